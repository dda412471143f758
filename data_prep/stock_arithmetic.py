"""StockArithmetic-v1: fictional stock problems with computed answers, and the strict verifier of a reply."""

import json
import random
from collections.abc import Mapping
from typing import Any, TypeVar

from datasets import Dataset, DatasetDict, Features, List, Value

from .corpus_format import describe, is_integer

ID50, OOD100 = "ID50", "OOD100"
LARGEST_ID_OPERAND = 50
MAX_OPERAND = 100
LARGEST_OPERAND = {ID50: LARGEST_ID_OPERAND, OOD100: MAX_OPERAND}
WARM_START_ROWS = 128
PARTS = (("train", ID50, 1000), ("validation", ID50, 200), ("test", ID50, 100), ("test", OOD100, 100))

ANSWER_KEY = "final_stock"
LARGEST_ANSWER = 300  # three operands of 100, nothing withdrawn
MAX_ANSWER_CHARACTERS = 256

# No digit in any of these words: the numbers of a prompt are its five operands.
ITEMS = tuple("lamps chairs bottles ropes tiles books bolts bags pumps boxes candles kites".split())
TEMPLATES = (
    "A shop counts its {item}: {} in stock. It receives {} and then {} more. Later it sells {}, then {}.",
    "The stock of {item} in a warehouse is {}. Deliveries add {} and then {}. Orders then take {} and {}.",
    "Stock list for {item}. Start: {}. Delivered: {}, then {}. Withdrawn: {}, then {}.",
    "A depot stores {item}. The day begins with {}. Trucks bring {} and {}. Workers later take out {} and {}.",
    "A school keeps a stock of {} ({item}). It is sent {} in May and {} in June. It uses {} in July and {} in August.",
    "Shelves for {item} hold {}. A supplier drops off {}, another supplier {}. A client then picks up {}, another {}.",
    "At opening the {item} in stock number {}. Add a delivery of {} and one of {}. Subtract sales of {} and of {}.",
    "Today's log for {item}: opening stock {}, then plus {}, plus {}, minus {}, minus {}.",
)
WORDINGS = len(TEMPLATES) * len(ITEMS)
INSTRUCTION = 'What is the final stock? Reply with one JSON object only: {"final_stock": N}, where N is an integer.'

_MESSAGES = List({"role": Value("string"), "content": Value("string")})
FEATURES = Features(
    {
        "id": Value("string"),
        "prompt": _MESSAGES,
        "completion": _MESSAGES,
        "problem": {
            "initial": Value("int64"),
            "deliveries": List(Value("int64")),
            "withdrawals": List(Value("int64")),
            "final_stock": Value("int64"),
            "stratum": Value("string"),
        },
        "use": Value("string"),
    }
)

Labelled = TypeVar("Labelled", Dataset, DatasetDict)


def build(seed: int) -> DatasetDict:
    """All 1,400 problems of a seed: `train` (1,000), `validation` (200) and `test` (100 ID50, then 100 OOD100).

    Columns: id ("train-0007"), prompt and completion (messages, as TRL's SFTTrainer and SingleTurn read them), problem
    ({"initial", "deliveries": [2], "withdrawals": [2], "final_stock", "stratum"}), use ("warm_start" for the first 128
    train rows, "continued" for the other 872, "validation", "test").
    A whole problem is drawn again, never one operand of it, when no operand of an OOD100 problem exceeds 50 and when
    its canonical form occurred before in any split: what stays has the distribution of `draw` under that condition.
    The numbers come from random.Random, seeded by a string (SHA-512): the same on every machine, whatever
    PYTHONHASHSEED or numpy. Raises ValueError for a seed that is no integer.
    """
    if not is_integer(seed):
        raise ValueError(f"seed is {seed!r}: expected an integer")
    generator = random.Random(f"{seed}/stock-arithmetic")
    seen: set[tuple[int, ...]] = set()
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split, _, _ in PARTS}
    for split, stratum, size in PARTS:
        last = len(rows[split]) + size
        while len(rows[split]) < last:
            problem = draw(stratum, generator)
            key = canonical(problem)
            if key in seen or (stratum == OOD100 and max(operands(problem)) <= LARGEST_ID_OPERAND):
                continue
            seen.add(key)
            rows[split].append(_row(split, len(rows[split]), problem, seed))
    return DatasetDict({split: Dataset.from_list(kept, features=FEATURES) for split, kept in rows.items()})


def draw(stratum: str, generator: random.Random) -> dict[str, Any]:
    """One problem: initial and deliveries uniform in 0..m, withdrawals uniform in 0..min(m, what is in stock then).

    m is 50 for ID50 and 100 for OOD100; so the running stock is never negative.
    """
    largest = LARGEST_OPERAND[stratum]
    initial, *deliveries = (generator.randint(0, largest) for _ in range(3))
    left = initial + sum(deliveries)
    withdrawals: list[int] = []
    for _ in range(2):
        withdrawals.append(generator.randint(0, min(largest, left)))
        left -= withdrawals[-1]
    return {
        "initial": initial,
        "deliveries": deliveries,
        "withdrawals": withdrawals,
        "final_stock": left,
        "stratum": stratum,
    }


def operands(problem: Mapping[str, Any]) -> tuple[int, ...]:
    """The five numbers of a problem in the order of its statement: initial, deliveries, withdrawals.

    Raises ValueError unless they are what a problem can have: `initial` one integer, `deliveries` and `withdrawals`
    lists of two, each 0..100 and no boolean, and the running stock never below 0.
    """
    if not isinstance(problem, Mapping):
        raise ValueError(
            f"problem is {describe(problem)}: expected initial, deliveries and withdrawals, as in `build`"
        )
    initial = _operand("initial", problem.get("initial"))
    deliveries, withdrawals = (_pair(field, problem.get(field)) for field in ("deliveries", "withdrawals"))
    left = initial + sum(deliveries)
    for position, withdrawal in enumerate(withdrawals):
        if withdrawal > left:
            raise ValueError(
                f"problem: withdrawals[{position}] is {withdrawal} and {left} are in stock: expected a running stock "
                "that is never negative; give the problem as `build` made it"
            )
        left -= withdrawal
    return (initial, *deliveries, *withdrawals)


def final_stock(problem: Mapping[str, Any]) -> int:
    """The answer, computed from the operands: initial + deliveries - withdrawals, 0..300; ValueError as `operands`.

    >>> final_stock({"initial": 20, "deliveries": [15, 5], "withdrawals": [2, 1]})
    37
    """
    initial, first_in, second_in, first_out, second_out = operands(problem)
    return initial + first_in + second_in - first_out - second_out


def canonical(problem: Mapping[str, Any]) -> tuple[int, ...]:
    """The operands with deliveries and withdrawals sorted: equal for problems that differ in their order alone.

    Raises ValueError as `operands`.

    >>> canonical({"initial": 20, "deliveries": [15, 5], "withdrawals": [2, 1]})
    (20, 5, 15, 1, 2)
    """
    initial, first_in, second_in, first_out, second_out = operands(problem)
    return (initial, *sorted((first_in, second_in)), *sorted((first_out, second_out)))


def statement(problem: Mapping[str, Any], wording: int = 0) -> str:
    """The problem in words, its five operands in digits and no other number; `wording` is 0..WORDINGS - 1.

    Raises ValueError for a wording out of range or no integer, and as `operands`.

    >>> statement({"initial": 20, "deliveries": [15, 5], "withdrawals": [2, 1]}, wording=2)
    'Stock list for lamps. Start: 20. Delivered: 15, then 5. Withdrawn: 2, then 1.'
    """
    if not is_integer(wording) or not 0 <= wording < WORDINGS:
        raise ValueError(f"wording is {wording!r}: expected 0 to {WORDINGS - 1}")
    item, template = divmod(wording, len(TEMPLATES))
    return TEMPLATES[template].format(*operands(problem), item=ITEMS[item])


def target(problem: Mapping[str, Any]) -> str:
    """The reply that scores 1, at most 20 characters.

    >>> target({"initial": 20, "deliveries": [15, 5], "withdrawals": [2, 1]})
    '{"final_stock": 37}'
    """
    return json.dumps({ANSWER_KEY: final_stock(problem)})


def without_labels(dataset: Labelled) -> Labelled:
    """The id and prompt of every row and nothing else, for stages that generate and must not see an answer."""
    return dataset.select_columns(["id", "prompt"])


def score(text: Any, finish_reason: str, problem: Mapping[str, Any], token_ids_valid: bool = True) -> dict[str, Any]:
    """Verify one reply strictly: a dict of valid (bool), value (int or None), reason, expected, reward (1.0 or 0.0).

    `text` is the completion decoded with special tokens kept and only the final EOS dropped, `finish_reason` is "eos"
    or "length", `token_ids_valid` is False when the tokenizer does not know one of the ids. Valid is a text of at most
    256 characters, white space counted, that is one JSON object with the key "final_stock" once, no other key, and an
    integer 0..300 (-0 is JSON for 0), with nothing around it but JSON white space. A valid reply has its answer as
    `value`, the reason None, and the reward 1.0 where value equals expected, else 0.0. Any other has the value None,
    the reward 0.0 and as reason the first that applies of "undecodable_token", "completion_without_eos",
    "oversized_or_nontext", "invalid_json_schema".
    Nothing of the text is executed, and no text raises. Raises ValueError for a problem as `operands` does, and for
    another finish_reason or token_ids_valid than those named: they would pass for a reply that failed.

    >>> problem = {"initial": 20, "deliveries": [15, 5], "withdrawals": [2, 1]}
    >>> score('{"final_stock": 36}', "eos", problem)
    {'valid': True, 'value': 36, 'reason': None, 'expected': 37, 'reward': 0.0}
    """
    expected = final_stock(problem)
    if not isinstance(token_ids_valid, bool):
        raise ValueError(f"token_ids_valid is {token_ids_valid!r}: expected True or False")
    if finish_reason not in ("eos", "length"):
        raise ValueError(f'finish_reason is {finish_reason!r}: expected "eos" or "length", as a Turn has it')
    value, reason = None, None
    if not token_ids_valid:
        reason = "undecodable_token"
    elif finish_reason != "eos":
        reason = "completion_without_eos"
    elif not isinstance(text, str) or len(text) > MAX_ANSWER_CHARACTERS:
        reason = "oversized_or_nontext"
    else:
        value = _answer(text)
        reason = "invalid_json_schema" if value is None else None
    return {
        "valid": reason is None,
        "value": value,
        "reason": reason,
        "expected": expected,
        "reward": 1.0 if value == expected else 0.0,
    }


def _operand(field: str, number: Any) -> int:
    """The operand itself; ValueError where it is none."""
    if not is_integer(number) or not 0 <= number <= MAX_OPERAND:
        raise ValueError(
            f"problem: {field} is {describe(number)}: expected an integer from 0 to {MAX_OPERAND}; give the problem "
            "as `build` made it"
        )
    return number


def _pair(field: str, numbers: Any) -> tuple[int, int]:
    """The two operands of deliveries or withdrawals; ValueError where they are no two."""
    if not isinstance(numbers, list | tuple) or len(numbers) != 2:
        raise ValueError(
            f"problem: {field} is {describe(numbers)}: expected a list of two integers; give the problem as `build` "
            "made it"
        )
    return _operand(f"{field}[0]", numbers[0]), _operand(f"{field}[1]", numbers[1])


def _answer(text: str) -> int | None:
    """The integer of an answer object, or None where text of at most 256 characters is anything else."""
    try:
        # Objects become tuples of pairs, which keep duplicate keys; arrays stay lists. 256 characters are too few for
        # Python's limit on the digits of an integer (640 at least), and enough to nest too deeply on a deep stack.
        pairs = json.loads(text, object_pairs_hook=tuple)
    except (json.JSONDecodeError, RecursionError):
        return None
    if not isinstance(pairs, tuple) or [key for key, _ in pairs] != [ANSWER_KEY]:
        return None
    value = pairs[0][1]
    is_answer = type(value) is int and 0 <= value <= LARGEST_ANSWER  # a bool is an int to isinstance
    return value if is_answer else None


def _row(split: str, index: int, problem: dict[str, Any], seed: int) -> dict[str, Any]:
    """One row of `build`; its wording depends on seed and id alone, so it can tell nothing about the operands."""
    row_id = f"{split}-{index:04d}"
    wording = random.Random(f"{seed}/stock-arithmetic/wording/{row_id}").randrange(WORDINGS)
    use = split
    if split == "train":
        use = "warm_start" if index < WARM_START_ROWS else "continued"
    return {
        "id": row_id,
        "prompt": [{"role": "user", "content": f"{statement(problem, wording)}\n{INSTRUCTION}"}],
        "completion": [{"role": "assistant", "content": target(problem)}],
        "problem": problem,
        "use": use,
    }
