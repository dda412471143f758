"""What decides a run's numbers beside its options, as text and digests: code, tokenizer, model, adapter, libraries."""

import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import json
import platform
import re
import sys
import textwrap
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from turngrpo.trainer.forward.policy import tensors_digest

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "tokenizers", "datasets", "numpy", "turngrpo")
SHOWN = 100  # characters of a value that stand in a fingerprint as they are
PLAIN = (type(None), bool, int, float, complex, str, bytes, range, type(...))
VALUES = (
    *(int, float, complex, str, bytes, date, timedelta, Decimal, Fraction, re.Pattern, PurePath),
    *(np.generic, torch.dtype, torch.device),
)
# Of a model's config: where it came from, and what tokenizer and generation say themselves.
NOT_OF_THE_MODEL = (
    "_name_or_path transformers_version torch_dtype dtype _commit_hash use_cache architectures eos_token_id "
    "bos_token_id pad_token_id"
).split()
NOT_OF_THE_ADAPTER = ("base_model_name_or_path", "revision", "inference_mode", "peft_version")
# Of a class: what Python adds (__slotnames__ when one is copied or sent on), and what says nothing of what it does.
NOT_OF_A_CLASS = (
    "__dict__ __weakref__ __module__ __doc__ __slotnames__ __annotations__ __annotate__ __annotate_func__ "
    "__annotations_cache__ __qualname__ __firstlineno__ __static_attributes__ __parameters__ __orig_bases__ "
    "__abstractmethods__ _abc_impl __dataclass_fields__ __dataclass_params__ __match_args__ __protocol_attrs__ "
    "__non_callable_proto_members__"
).split()
OF_A_PROTOCOL = ("_no_init_or_replace_init", "object.__init__")  # before and after the first object of a subclass


def code_digest(*values: Any) -> str:
    """Return the SHA-256 of what functions, classes or objects are: their code, the code it calls, what these hold.

    Functions by source, or by bytecode and constants where there is none (lambdas, exec), with their default and
    closure values and the globals that they read; objects by class and attributes; models by config and weights.
    Libraries are told by their names alone, and objects of theirs that are no known values by their class.
    """
    return _Description(values).text


class _Description:
    """One walk over a value; every part becomes a SHA-256, so that shared and equal parts read the same."""

    def __init__(self, values: tuple[Any, ...]):
        packages = {_package(getattr(value, "func", value)) for value in values}  # of a partial, the function's
        self.roots = {"turngrpo", *packages.difference(sys.stdlib_module_names, PACKAGES)}
        self.known: dict[int, tuple[str, Any]] = {}  # the values too, so that no id is given away again
        self.text = self.of(list(values))

    def of(self, value: Any) -> str:
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if type(value) in PLAIN:
            return repr(value)
        if id(value) not in self.known:
            self.known[id(value)] = (f"<{type(value).__qualname__} around this>", value)  # a circle ends here
            text = _digest("\n".join(self._parts(value)))
            self.known[id(value)] = (text, value)
        return self.known[id(value)][0]

    def _parts(self, value: Any) -> Iterator[str]:
        """Yield what a value consists of, as text."""
        yield type(value).__qualname__
        if isinstance(value, torch.Tensor | np.ndarray | torch.nn.Module | PreTrainedTokenizerBase):
            yield _known_digest(value)
        elif isinstance(value, VALUES):
            yield repr(value)
        elif isinstance(value, Mapping):
            yield from sorted(f"{self.of(key)}: {self.of(one)}" for key, one in value.items())
        elif isinstance(value, set | frozenset):
            yield from sorted(map(self.of, value))
        elif isinstance(value, list | tuple | deque):
            yield from map(self.of, value)
        elif isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif isinstance(value, types.MethodType):
            yield from map(self.of, (value.__func__, value.__self__))
        elif isinstance(value, functools.partial):
            yield from map(self.of, (value.func, value.args, value.keywords))
        elif isinstance(value, type):
            yield from self._class(value)
        elif isinstance(value, types.ModuleType):
            yield value.__name__
        else:
            yield from self._object(value)

    def _object(self, value: Any) -> Iterator[str]:
        """Yield class and attributes of an object of the user's, what a library's wrapper leads to, or a name."""
        kind = type(value)
        if self._is_read(kind):
            yield self.of(kind)
            slots = [n for one in kind.__mro__ for n in getattr(one, "__slots__", ()) if hasattr(value, n)]
            yield self.of({name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {}))
            return
        yield f"{kind.__module__} {getattr(value, '__qualname__', getattr(value, '__name__', ''))}"
        wrapped = ("__wrapped__", "__func__", "fget", "fset", "func")
        yield from (self.of(getattr(value, name)) for name in wrapped if hasattr(value, name))

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        if not self._is_read(function):
            yield f"{function.__module__}.{function.__qualname__}"
            return
        yield function.__name__
        yield from self._code(function.__code__)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        held = {name: _content(cell) for name, cell in cells if name != "__class__"}  # which super() reads
        yield from map(self.of, (function.__defaults__, function.__kwdefaults__, held))
        for name, value in sorted(_globals_read(function).items()):
            yield f"{name} = {self.of(value)}"

    def _code(self, code: types.CodeType) -> Iterator[str]:
        """Yield the source of a function, or of one without its own lines what it executes."""
        source = _source(code)
        if source is not None:
            yield source
            return
        yield code.co_code.hex()
        yield repr((code.co_names, code.co_varnames, code.co_freevars))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._code(constant)
            else:
                yield self.of(constant)

    def _class(self, kind: type) -> Iterator[str]:
        if not self._is_read(kind):
            yield f"{kind.__module__}.{kind.__qualname__}"
            return
        yield kind.__name__
        yield from map(self.of, kind.__bases__)
        made = dataclasses.is_dataclass(kind) or issubclass(kind, tuple)  # their methods are made from the fields
        if dataclasses.is_dataclass(kind):
            yield self.of([(f.name, f.default, f.default_factory) for f in dataclasses.fields(kind)])
        for name, value in sorted(vars(kind).items()):
            code = getattr(value, "__code__", None)
            by_python = made and code and code.co_filename.startswith("<")
            by_python = by_python or name == "__init__" and getattr(value, "__qualname__", "") in OF_A_PROTOCOL
            if name not in NOT_OF_A_CLASS and not by_python:
                yield f"{name} = {self.of(value)}"

    def _is_read(self, value: Any) -> bool:
        """Whether something's code is the user's or ours, and no library's."""
        package = _package(value)
        if package in self.roots or (package in ("", "builtins") and isinstance(value, types.FunctionType)):
            return True
        file = getattr(sys.modules.get(value.__module__ or ""), "__file__", None) or ""
        installed = any(part in ("site-packages", "dist-packages") for part in PurePath(file).parts)
        return not installed and package not in sys.stdlib_module_names


def _package(value: Any) -> str:
    kind = value if hasattr(value, "__module__") and hasattr(value, "__qualname__") else type(value)
    return (kind.__module__ or "").split(".")[0]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _known_digest(value: Any) -> str:
    """Return the digest of tensors, arrays, models and tokenizers."""
    if isinstance(value, torch.nn.Module):
        return f"{model_digest(value)} {tensors_digest(value.state_dict().items())}"
    if isinstance(value, PreTrainedTokenizerBase):
        return repr(tokenizer_facts(value))
    if isinstance(value, torch.Tensor):
        return tensors_digest([("", value)])
    return repr((value.dtype, value.shape, value.tolist()))


def _source(code: types.CodeType) -> str | None:
    if code.co_name == "<lambda>":  # of whose line others may have a part
        return None
    try:
        return textwrap.dedent(inspect.getsource(code)).rstrip()
    except (OSError, TypeError, SyntaxError):
        return None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


def _globals_read(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals that a function reads by name, those of modules as `module.name`."""
    read: dict[str, Any] = {}
    names = set()
    for one in _instructions(function.__code__):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME") and one.argval in function.__globals__:
            read[one.argval] = function.__globals__[one.argval]
        elif one.opname == "IMPORT_NAME" and one.argval in sys.modules:
            read[one.argval] = sys.modules[one.argval]
        elif one.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")):
            names.add(one.argval)
    for module, value in list(read.items()):
        if isinstance(value, types.ModuleType):
            read |= {f"{module}.{name}": vars(value)[name] for name in names if name in vars(value)}
    return read


def reward_facts(functions: Sequence[Any], names: Sequence[str], others: Sequence[Any] = ()) -> dict[str, str]:
    """Return the order of reward functions and what each is; `others` are what goes with each, such as a tokenizer."""
    pairs = zip(functions, others or [None] * len(functions), strict=True)
    digests = {name: code_digest(*pair) for name, pair in zip(names, pairs, strict=True)}
    return {"order": ", ".join(names) or "none"} | digests


def workflow_facts(workflow: Any) -> dict[str, str]:
    """Return a bound workflow's class, its code, and every attribute by name as text or digest."""
    values = {name: shown(value) for name, value in vars(workflow).items()}
    kind = type(workflow)
    return {"class": kind.__qualname__, "code": code_digest(kind), "strict_format": shown(workflow.strict_format)} | {
        name: value for name, value in values.items() if name != "tokenizer"
    }


def shown(value: Any) -> str:
    """Return a plain value as text where that is short, else its SHA-256."""
    text = repr(value) if type(value) in PLAIN else ""
    return text if 0 < len(text) <= SHOWN else f"SHA-256 {code_digest(value)}"


def tokenizer_facts(processing_class: Any) -> dict[str, str]:
    """Return digests of a tokenizer's vocabulary with its rules, and of its chat template, and its special tokens."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        text = json.dumps({name: rules[name] for name in rules if name not in ("truncation", "padding")})
    else:
        text = json.dumps([sorted(tokenizer.get_vocab().items()), repr(tokenizer.added_tokens_decoder)])
    special = {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())}
    return {
        "vocabulary": _digest(text),
        "special_tokens": repr(special),
        "chat_template": _digest(repr(getattr(tokenizer, "chat_template", None))),
    }


def adapter_facts(model: Any) -> dict[str, str]:
    """Return every field of a model's PEFT configs as text; none without an adapter."""
    return {
        f"{adapter}.{name}": _sorted_text(value)
        for adapter, config in (getattr(model, "peft_config", None) or {}).items()
        for name, value in config.to_dict().items()
        if name not in NOT_OF_THE_ADAPTER
    }


def _sorted_text(value: Any) -> str:
    if isinstance(value, set | frozenset):
        return repr(sorted(value, key=repr))
    return repr(value.value if isinstance(value, enum.Enum) else value)


def model_digest(model: Any) -> str:
    """Return the SHA-256 of a model's class and config, without where it came from."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.to_dict() if hasattr(getattr(base, "config", None), "to_dict") else {}
    text = json.dumps(_without(config, NOT_OF_THE_MODEL), sort_keys=True, default=_sorted_text)
    return _digest(f"{type(base).__qualname__} {text}")


def _without(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, dict):
        return {str(key): _without(one, names) for key, one in value.items() if key not in names}
    return value


def precision(model: Any) -> str:
    """Return the types of a model's parameters and its attention, as text."""
    types_found = sorted({str(parameter.dtype) for parameter in model.parameters()})
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return f"{', '.join(types_found)}; attention {attention}"


def optimizer_facts(optimizer: Any, scheduler: Any) -> dict[str, str]:
    """Return what an optimizer and a schedule that the user made do; none where the trainer makes them."""
    if optimizer is None:
        return {}
    groups = [{n: v for n, v in group.items() if n not in ("params", "lr")} for group in optimizer.param_groups]
    rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    facts = {"class": type(optimizer).__qualname__, "groups": repr(groups), "learning_rates": repr(rates)}
    functions = getattr(scheduler, "lr_lambdas", None)
    return facts | {"schedule": f"{type(scheduler).__qualname__} {code_digest(functions)}"}


def subclass_code(trainer: Any) -> str | None:
    """Return the digest of the methods that a user put on top of a trainer of ours, None for ours itself."""
    kinds = [kind.__module__.startswith("turngrpo.trainer") for kind in type(trainer).__mro__]
    own = type(trainer).__mro__[: kinds.index(True) if True in kinds else 0]
    methods = [{n: v for n, v in vars(kind).items() if isinstance(v, types.FunctionType)} for kind in own]
    return code_digest(*methods) if own else None


def library_versions(device: Any) -> dict[str, str]:
    """Return the versions of what computes, and on what."""
    found = {"python": platform.python_version(), "device": torch.device(device).type}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
