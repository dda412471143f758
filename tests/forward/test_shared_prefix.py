"""Shared prefixes: hidden states, gradients and decoding against plain padded batches of whole rows."""

import contextlib

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import SIZES, sharpen, tiny_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import relative_gap
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MptConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from turngrpo.trainer.forward import joined_attention as joined
from turngrpo.trainer.forward import shared_prefix
from turngrpo.trainer.forward.decoding import start_decoding
from turngrpo.trainer.forward.joined_attention import Layout, Span, join, joined_attention
from turngrpo.trainer.forward.policy import Policy, evaluating, zero_dropout
from turngrpo.trainer.forward.shared_prefix import UnsupportedAttention, compute_prefix, run_together
from turngrpo.trainer.forward.support import why_unsupported

V = 40
PREFIXES = [[4, 5, 6, 7, 8, 9, 10], [], [20, 21, 22, 23]]
SUFFIXES = [[11, 12, 13], [14, 15, 16, 17, 18], [19], [24, 25, 26, 27], [30, 31], [32, 4, 9, 9, 9, 35], [36, 37]]
CLUSTERS = [0, 0, 0, 0, 1, 2, 2]
TOKENS = 23  # of all suffixes
COMMON = SIZES | {"vocab_size": V}
ONCE_EACH = [[i] for i in range(7)]
CUTS = {"together": None, "whole": [list(range(7))], "one by one": ONCE_EACH, "unequal": [[0, 1], [2, 3, 4], [5], [6]]}


def build(config=None, dtype=torch.float64, attention="sdpa"):
    torch.manual_seed(0)
    if config is None:
        model = sharpen(tiny_model(V, dtype=dtype))
        for parent in [model.model, *model.model.layers]:
            for name, norm in parent.named_children():
                if "norm" in name:  # transformers' own goes through float32: gradients would agree to 1e-8 only
                    setattr(parent, name, nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, dtype=dtype))
        return model
    return sharpen(AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype))


def with_lora(model):
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return adapted.to(next(model.parameters()).dtype)


def weights(model, dtype):
    size = model.config.get_text_config().hidden_size
    return torch.randn(TOKENS, size, generator=torch.Generator().manual_seed(1)).to(dtype)


def plain_hidden(policy, suffixes=SUFFIXES, clusters=CLUSTERS):
    """Hidden states of the suffixes' tokens, packed, from one right-padded batch of whole rows."""
    rows = [PREFIXES[cluster] + suffix for suffix, cluster in zip(suffixes, clusters, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [1] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    hidden = policy.backbone(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    return torch.cat([h[len(row) - len(s) : len(row)] for h, row, s in zip(hidden, rows, suffixes, strict=True)])


def gradients(policy):
    found = {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad()
    return found


def plain_pass(policy):
    hidden = plain_hidden(policy)
    (hidden * weights(policy.causal, hidden.dtype)).sum().backward()
    return hidden.detach(), gradients(policy)


def shared_pass(policy, cut="whole", clusters=CLUSTERS):
    """The same with prefixes computed once and members in micro-batches, or all of it together."""
    if CUTS[cut] is None:
        hidden, _ = run_together(policy, PREFIXES, SUFFIXES, clusters)
        (hidden * weights(policy.causal, hidden.dtype)).sum().backward()
        return hidden.detach(), gradients(policy)
    prefix = compute_prefix(policy, PREFIXES)
    parts = []
    for members in CUTS[cut]:
        hidden = prefix.suffix_hidden([SUFFIXES[i] for i in members], [clusters[i] for i in members])
        weight = weights(policy.causal, hidden.dtype).split([len(s) for s in SUFFIXES])
        (hidden * torch.cat([weight[i] for i in members])).sum().backward()
        parts.append(hidden.detach())
    prefix.backward()
    return torch.cat(parts), gradients(policy)


def gap(ours, theirs):
    return float((ours - theirs).detach().norm() / theirs.detach().norm())


class RowsSeen:
    """How many tokens pass through the first layer's MLP, call by call."""

    def __init__(self, model):
        self.calls = []
        mlp = model.get_submodule("model.layers.0.mlp")
        self.hook = mlp.register_forward_pre_hook(lambda module, args: self.calls.append(args[0][..., 0].numel()))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.hook.remove()


# ---- the attention itself ----


def test_join_by_hand():
    # Weights exp(L): 1 and 3, so (1 * 0 + 3 * 4) / 4 = 3, and L = ln 4; the plain mean would be 2.
    out, lse = join(*(torch.tensor(x, dtype=torch.float64) for x in ([[0.0]], [0.0], [[4.0]], [1.0986122886681098])))
    assert out.tolist() == [[pytest.approx(3.0)]] and lse.tolist() == [pytest.approx(1.3862943611198906)]


def test_attention_by_hand():
    """With queries of 0 every token takes the mean of the values that it may see."""
    query, key = torch.zeros(1, 2, 4, 1), torch.zeros(1, 1, 4, 1)
    value = torch.tensor([10.0, 20.0, 100.0, 7.0]).reshape(1, 1, 4, 1)
    prefix = torch.zeros(1, 1, 5, 1), torch.tensor([1.0, 2.0, 3.0, 50.0, 60.0]).reshape(1, 1, 5, 1)
    layout = Layout([slice(0, 2), slice(2, 3), slice(3, 4)], [Span(slice(0, 3), slice(0, 3))])
    out = joined_attention(query, key, value, layout, 1.0, prefix)[0, :, :, 0]
    # (1+2+3+10)/4 = 4, (1+2+3+10+20)/5 = 7.2, (1+2+3+100)/4 = 26.5; the last has no prefix. A member that saw its
    # neighbour would have (1+2+3+10+20+100)/6 = 22.67 in the third place.
    assert out.tolist() == [pytest.approx([4.0, 7.2, 26.5, 7.0])] * 2


def reference_attention(query, key, value, layout, scale, prefix):
    """Attention from its definition, in float64: keys repeated, one softmax over all that a member sees."""
    spans = {row: keys for rows, keys in layout.shared for row in range(rows.start, rows.stop)}
    parts = []
    for rows in layout.own:
        seen = spans.get(rows.start, slice(0, 0))
        own, length = rows.stop - rows.start, seen.stop - seen.start
        keys, values = (
            torch.cat([p[:, :, seen], x[:, :, rows]], 2).double().repeat_interleave(query.shape[1] // x.shape[1], 1)
            for p, x in zip(prefix, (key, value), strict=True)
        )
        later = torch.ones(own, length + own).triu(length + 1).bool()
        scores = (query[:, :, rows].double() @ keys.transpose(2, 3) * scale).masked_fill(later, -torch.inf)
        parts.append(scores.softmax(-1) @ values)
    return torch.cat(parts, 2)


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("path", ["fused", "plain", "plain, block by block", "plain, values of another size"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_attention_and_its_backward(dtype, tolerance, path, device, monkeypatch):
    if path != "fused":
        monkeypatch.setattr(joined, "_fused_on_cpu", lambda query, key, value: False)
        monkeypatch.setattr(joined, "_fused_on_cuda", lambda query, value: False)
    monkeypatch.setattr(joined, "BLOCK_ELEMENTS", 50 if "block" in path else 2**24)
    torch.manual_seed(0)
    size = 16 if "size" in path else 8
    shapes = [(6, 9, 8), (2, 9, 8), (2, 9, size), (2, 12, 8), (2, 12, size)]
    tensors = [torch.randn(1, h, n, d, device=device).to(dtype).requires_grad_() for h, n, d in shapes]
    own = [slice(0, 3), slice(3, 4), slice(4, 7), slice(7, 9)]
    layout = Layout(own, [Span(slice(0, 4), slice(0, 5)), Span(slice(7, 9), slice(5, 12))])
    out = joined_attention(*tensors[:3], layout, 0.5, tuple(tensors[3:]))
    expected = reference_attention(*tensors[:3], layout, 0.5, tensors[3:])
    assert gap(out.double(), expected) < tolerance
    direction = torch.randn_like(out)
    ours = torch.autograd.grad(out, tensors, direction)
    theirs = torch.autograd.grad(expected, tensors, direction.double())
    for mine, other in zip(ours, theirs, strict=True):
        assert gap(mine.double(), other.double()) < tolerance


# ---- training passes ----


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
def test_equal_to_the_plain_padded_batch(cut, lora, checkpointing):
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        model = with_lora(build(dtype=dtype)) if lora else build(dtype=dtype)
        policy = Policy(model.train())
        hidden, grads = plain_pass(policy)
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        ours, our_grads = shared_pass(policy, cut)
        assert gap(ours, hidden) < tolerance
        assert relative_gap(our_grads, grads) < tolerance
        for name, value in grads.items():
            assert gap(our_grads[name], value) < 100 * tolerance, name


def test_wrong_answers_are_far_away():
    policy = Policy(build())
    hidden, grads = plain_pass(policy)
    swapped, swapped_grads = shared_pass(policy, clusters=[2, 0, 0, 0, 1, 2, 2])  # one member under another's prefix
    assert gap(swapped[:3], hidden[:3]) > 0.1 and gap(swapped[3:], hidden[3:]) < 1e-12
    assert relative_gap(swapped_grads, grads) > 0.1
    prefix = compute_prefix(policy, PREFIXES)
    (prefix.suffix_hidden(SUFFIXES, CLUSTERS) * weights(policy.causal, torch.float64)).sum().backward()
    assert relative_gap(gradients(policy), grads) > 0.1  # without the last backward the prefix has no part in it


def test_members_in_any_order_and_clusters_without_members():
    policy = Policy(build())
    order = [5, 0, 4, 6, 1, 3, 2]
    with torch.no_grad():
        prefix = compute_prefix(policy, [*PREFIXES, [1, 2, 3]])
        hidden = prefix.suffix_hidden([SUFFIXES[i] for i in order], [CLUSTERS[i] for i in order])
        expected = plain_hidden(policy).split([len(s) for s in SUFFIXES])
    assert gap(hidden, torch.cat([expected[i] for i in order])) < 1e-13


def test_clusters_without_any_prefix():
    policy = Policy(build())
    prefix = compute_prefix(policy, [[]])
    hidden = prefix.suffix_hidden(SUFFIXES[4:5], [0])
    assert gap(hidden, plain_hidden(policy, SUFFIXES[4:5], [1])) < 1e-13
    hidden.sum().backward()
    prefix.backward()
    assert all(parameter.grad is not None for name, parameter in policy.model.named_parameters() if "norm" in name)


@pytest.mark.parametrize("autocast", [False, True], ids=["weights", "autocast"])
def test_bfloat16(autocast):
    exact = Policy(build(dtype=torch.float32))
    low = build(dtype=torch.float32 if autocast else torch.bfloat16)
    context = lambda: torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()  # noqa: E731
    policy = Policy(low, context)
    hidden, grads = (plain_pass(exact)[i] for i in (0, 1))
    plain, plain_grads = plain_pass(policy)
    ours, our_grads = shared_pass(policy, "unequal")
    # As far from float32 as the plain pass in bfloat16 is: 8 bits, sharpened by matrices of 3 times the usual size.
    assert gap(ours.float(), hidden) < 1.5 * gap(plain.float(), hidden) < 0.06
    as_float = [{name: value.float() for name, value in found.items()} for found in (our_grads, plain_grads)]
    assert relative_gap(as_float[0], grads) < 1.5 * relative_gap(as_float[1], grads) < 0.15
    assert why_unsupported(policy) is None


def test_every_token_passes_the_network_once():
    model = build().train()
    policy = Policy(model)
    with RowsSeen(model) as seen:
        shared_pass(policy)
        assert seen.calls == [11, 23]  # prefixes of 7, 0 and 4; all suffixes; the padded batch has 7 x 12 = 84
        seen.calls.clear()
        shared_pass(policy, "unequal")
        assert seen.calls == [11, 8, 7, 6, 2]
        seen.calls.clear()
        shared_pass(policy, "together")
        assert seen.calls == [34]
        seen.calls.clear()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        shared_pass(policy)
        assert seen.calls == [11, 23, 23, 11]  # recomputed once each: suffixes first, the prefix at the end


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator makes, views apart."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for x in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(x, torch.Tensor) and not x._is_view():
                self.elements = max(self.elements, x.numel())
        return results


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
def test_prefix_keys_are_never_expanded_and_scores_never_whole(checkpointing):
    model = build(dtype=torch.float32).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy, long = Policy(model), torch.arange(400).remainder(V).tolist()
    suffixes, clusters = [[member, 5, 6, 7] for member in range(16)], [0] * 16
    prefix = compute_prefix(policy, [long])
    with Largest() as largest:
        prefix.suffix_hidden(suffixes, clusters).sum().backward()
    # Keys of the prefix: 2 heads x 400 x 8 = 6,400, and as many elements of their gradient; hidden states in the MLP
    # 64 x 64 = 4,096. Expanded to 16 members 102,400, scores 4 heads x 64 x 400 = 102,400.
    assert largest.elements == 6400
    with Largest() as largest:
        run_together(policy, [long], suffixes, clusters)[0].sum().backward()
    assert largest.elements == 464 * 64  # the MLP; keys of the row: 2 heads x 464 x 8 = 7,424
    with evaluating(model):
        decoder, _ = start_decoding(policy, [long], suffixes, clusters, 1)
        with Largest() as largest:
            decoder.step(torch.arange(16))
    assert largest.elements == 64 * 32  # a weight; the prefix's keys are not even copied


def test_after_the_last_backward_a_prefix_is_gone():
    policy = Policy(build())
    prefix = compute_prefix(policy, PREFIXES)
    prefix.suffix_hidden(SUFFIXES, CLUSTERS).sum().backward()
    prefix.backward()
    with pytest.raises(AssertionError, match="freed"):  # a gradient gathered from here on would be lost
        prefix.suffix_hidden(SUFFIXES, CLUSTERS)


def test_reference_without_its_adapter():
    base = build()
    with torch.no_grad():
        expected = plain_hidden(Policy(base))
    policy = Policy(with_lora(base))
    with torch.no_grad(), policy.model.disable_adapter():
        hidden = compute_prefix(policy, PREFIXES).suffix_hidden(SUFFIXES, CLUSTERS)
    with torch.no_grad():
        adapted = compute_prefix(policy, PREFIXES).suffix_hidden(SUFFIXES, CLUSTERS)
    assert gap(hidden, expected) < 1e-13 and gap(adapted, expected) > 0.01


# ---- what the model is left like ----


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_plain_calls_are_untouched(attention):
    model = build(LlamaConfig(**COMMON), attention=attention).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy, functions = Policy(model), [layer._gradient_checkpointing_func for layer in model.model.layers]
    before, grads = plain_pass(policy)
    prefix = compute_prefix(policy, PREFIXES)
    hidden = prefix.suffix_hidden(SUFFIXES, CLUSTERS)
    between = plain_hidden(policy)  # between a pass and its backward, which recomputes layers
    assert model.config._attn_implementation == attention and torch.equal(between, before)
    (hidden * weights(model, hidden.dtype)).sum().backward()
    prefix.backward()
    assert relative_gap(gradients(policy), grads) < 1e-6  # the norms and eager attention compute in float32
    after, grads_after = plain_pass(policy)
    assert torch.equal(after, before) and relative_gap(grads_after, grads) == 0
    assert model.config._attn_implementation == attention and shared_prefix._CURRENT.get() is None
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == functions


def test_an_error_inside_a_pass_leaves_nothing_behind():
    model = build()
    policy = Policy(model)
    with pytest.raises(IndexError):
        compute_prefix(policy, [[4, 5, V]])  # no such token
    assert model.config._attn_implementation == "sdpa" and shared_prefix._CURRENT.get() is None
    assert gap(shared_pass(policy)[0], plain_pass(policy)[0]) < 1e-13


def test_refusals():
    policy = Policy(build())
    with torch.no_grad(), pytest.raises(ValueError, match="suffix is empty"):
        compute_prefix(policy, PREFIXES).suffix_hidden([[4], []], [0, 0])
    policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant=True"):
        compute_prefix(policy, PREFIXES)
    dropping = Policy(tiny_model(V, attention_dropout=0.5).train())
    with pytest.raises(UnsupportedAttention, match="Qwen2Attention asks for dropout"):
        compute_prefix(dropping, PREFIXES)


# ---- decoding ----

STEPS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17], [4, 5, 6, 7], [30, 31, 32], [33]]
KEPT = {1: [0, 1, 3, 4, 5, 6], 2: [0, 1, 2, 3], 3: [1, 2, 3], 4: [2]}  # at 2 the last prefix leaves, at 4 the first


def decode(policy, suffixes=SUFFIXES, clusters=CLUSTERS, steps=STEPS, kept=KEPT, prefixes=PREFIXES):
    """Decode `steps` with rows leaving; return (row's whole suffix, its cluster, hidden state) at every step."""
    with evaluating(policy.model):
        decoder, hidden = start_decoding(policy, prefixes, suffixes, clusters, len(steps))
        rows = [(list(suffix), cluster) for suffix, cluster in zip(suffixes, clusters, strict=True)]
        seen = [(*row, h) for row, h in zip(rows, hidden, strict=True)]
        for step, tokens in enumerate(steps):
            if step in kept:
                decoder.keep(torch.tensor(kept[step]))
                rows = [rows[i] for i in kept[step]]
            rows = [([*suffix, token], cluster) for (suffix, cluster), token in zip(rows, tokens, strict=True)]
            seen += [(*row, h) for row, h in zip(rows, decoder.step(torch.tensor(tokens)), strict=True)]
    return seen


def plain_last(policy, suffix, cluster, prefixes=PREFIXES):
    with evaluating(policy.model):
        ids = torch.tensor([prefixes[cluster] + suffix])
        return policy.backbone(input_ids=ids, use_cache=False).last_hidden_state[0, -1]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.1)]
)
@pytest.mark.parametrize("path", ["fused", "plain"])
def test_decoding_equals_plain_passes_while_rows_leave(dtype, tolerance, path, monkeypatch):
    if path == "plain":
        monkeypatch.setattr(joined, "_fused_on_cpu", lambda query, key, value: False)
    policy = Policy(build(dtype=dtype).train())
    seen = decode(policy)
    assert len(seen) == 7 + 7 + 6 + 4 + 3 + 1 and policy.model.training
    for suffix, cluster, hidden in seen:
        assert gap(hidden, plain_last(policy, suffix, cluster)) < tolerance
        if dtype == torch.float64:  # the wrong answers: another prefix, one token less
            assert gap(hidden, plain_last(policy, suffix, (cluster + 1) % 3)) > 0.01
            assert gap(hidden, plain_last(policy, suffix[1:] or [5], cluster)) > 0.01


@pytest.mark.parametrize("prefixes", [[[], [], []], [[4, 5], [6, 7], [8, 9]]], ids=["none", "equal"])
def test_decoding_with_no_prefix_and_with_prefixes_of_equal_length(prefixes):
    policy = Policy(build())
    for suffix, cluster, hidden in decode(policy, prefixes=prefixes):
        assert gap(hidden, plain_last(policy, suffix, cluster, prefixes)) < 1e-13


def test_a_row_does_not_depend_on_its_neighbours():
    policy = Policy(build(dtype=torch.float32))
    together = {tuple(suffix): hidden for suffix, _, hidden in decode(policy)}
    for row in range(7):
        tokens = [[step[row]] for step in STEPS[:1]]
        for suffix, _, hidden in decode(policy, [SUFFIXES[row]], [CLUSTERS[row]], tokens, {}):
            assert gap(hidden, together[tuple(suffix)]) < 1e-5


def test_decoding_keeps_prefixes_unexpanded_and_writes_in_place():
    policy = Policy(build())
    with evaluating(policy.model), RowsSeen(policy.model) as seen:
        decoder, _ = start_decoding(policy, [PREFIXES[0]], SUFFIXES[:4], [0] * 4, 3)
        places = [buffer.data_ptr() for layer in decoder._own for buffer in layer]
        prefix = [x.data_ptr() for layer in decoder._prefix for x in layer]
        for tokens in ([5, 6, 7, 8], [9, 10, 11, 12]):
            decoder.step(torch.tensor(tokens))
        decoder.keep(torch.tensor([1, 3]))
        decoder.step(torch.tensor([4, 4]))
    assert seen.calls == [20, 4, 4, 2]  # a prefix of 7 and suffixes of 13 in one row
    assert [x.data_ptr() for layer in decoder._prefix for x in layer] == prefix
    assert all(x._is_view() and x.shape == (1, 2, 7, 8) for layer in decoder._prefix for x in layer)  # of that row's
    assert [buffer.data_ptr() for layer in decoder._own for buffer in layer] == places


# ---- architectures ----

EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
LINEAR = {f"linear_{side}_head_dim": 8 for side in ("key", "value")} | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "full_attention_interval": 2,
    "head_dim": 8,
    "shared_expert_intermediate_size": 8,
}
GEMMA2 = {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0}
FULL = {"layer_types": ["full_attention"] * 2}
SUPPORTED = {
    "llama": LlamaConfig(**COMMON),
    "qwen2": Qwen2Config(**COMMON),
    "qwen3": Qwen3Config(**COMMON, head_dim=16),
    "qwen3 moe": Qwen3MoeConfig(**COMMON, **EXPERTS, head_dim=8),
    "mistral": MistralConfig(**COMMON, sliding_window=None),
    "gemma": GemmaConfig(**COMMON, head_dim=16),
    "granite": GraniteConfig(**COMMON, attention_multiplier=0.5),
    "gpt2": GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=3, eos_token_id=3),
}
REFUSED = {
    "mistral, window": (MistralConfig(**COMMON, sliding_window=4), "sliding window of 4"),
    "qwen2, window in one layer": (
        Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=4, max_window_layers=1),
        "sliding window of 4",
    ),
    "gemma2, windows": (Gemma2Config(**COMMON, **GEMMA2, sliding_window=4), "sliding window of 4"),
    "gemma2, softcap": (Gemma2Config(**COMMON, **GEMMA2, **FULL), "Gemma2Attention asks for softcap"),
    "gpt-oss, sinks": (
        GptOssConfig(**COMMON, **FULL, head_dim=8, num_local_experts=2, num_experts_per_tok=1),
        "GptOssAttention asks for s_aux",
    ),
    "qwen3 next, linear": (Qwen3NextConfig(**COMMON, **LINEAR, **EXPERTS), "linear_attention"),
    "mpt": (MptConfig(vocab_size=V, d_model=32, n_layers=2, n_heads=4, max_seq_len=64), "position"),
    "bloom": (BloomConfig(vocab_size=V, hidden_size=32, n_layer=2, n_head=4), "position"),
    "mamba": (MambaConfig(vocab_size=V, hidden_size=32, state_size=8, num_hidden_layers=2), "linear_attention"),
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_architectures(name):
    policy = Policy(build(SUPPORTED[name], torch.float32))
    zero_dropout(policy.model)
    assert why_unsupported(policy) is None
    hidden, grads = plain_pass(policy)
    ours, our_grads = shared_pass(policy, "unequal")
    assert gap(ours, hidden) < 1e-5 and relative_gap(our_grads, grads) < 1e-5
    for suffix, cluster, last in decode(policy):
        assert gap(last, plain_last(policy, suffix, cluster)) < 1e-5


@pytest.mark.parametrize("name", REFUSED)
def test_refused_architectures(name):
    config, reason = REFUSED[name]
    policy = Policy(build(config, torch.float32, attention="eager"))
    assert reason in str(why_unsupported(policy))
    assert policy.causal.config._attn_implementation == "eager" and shared_prefix._CURRENT.get() is None


def test_a_window_that_no_row_outgrows():
    policy = Policy(build(MistralConfig(**COMMON, sliding_window=12)))
    assert why_unsupported(policy, longest=12) is None and "12" in str(why_unsupported(policy, longest=13))
    assert gap(shared_pass(policy)[0], plain_pass(policy)[0]) < 1e-13  # rows of 12 at most
    with pytest.raises(UnsupportedAttention, match="sliding_window"), torch.no_grad():
        compute_prefix(policy, [[4] * 7]).suffix_hidden([[5] * 6], [0])


def test_the_probe_finds_what_no_declaration_tells():
    """A layer that mixes the tokens of a packed row, behind the attention interface."""
    model = build(dtype=torch.float32)

    class Mixing(nn.Module):
        def forward(self, hidden):
            return hidden + hidden.cumsum(1)

    model.model.layers[1].mlp = Mixing()
    assert "differ from a plain pass" in str(why_unsupported(Policy(model)))
