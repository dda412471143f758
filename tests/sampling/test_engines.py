"""The sampling engine: tokens and log-probabilities against plain full forwards, sharing, packing, noise, sampler."""

import math
import warnings

import numpy as np
import pytest
import torch
from tiny import SIZES, sharpen, tiny_model
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MptConfig,
    Qwen2Config,
    Qwen3NextConfig,
)

from turngrpo.trainer.forward.batching import common_prefix_length
from turngrpo.trainer.forward.policy import Policy
from turngrpo.trainer.reading.rollout import NoiseKey, Request
from turngrpo.trainer.sampling.noise import noise_stream, nucleus, sample_tokens
from turngrpo.trainer.sampling.transformers_engine import TransformersEngine

V, PAD, NEW = 40, 39, 8
EOS = (3, 7, 11, 15, 19, 23)  # many, so that random rows end early

# Group -> its members' prompts. Common prefixes: 6, 2, none (one member), none (the first tokens differ).
GROUPS = {
    0: [[4, 5, 6, 7, 8, 9, 10, 14, 14], [4, 5, 6, 7, 8, 9, 11, 4, 4, 4, 5], [4, 5, 6, 7, 8, 9, 12]],
    1: [[20, 21, 10, 4, 9, 30], [20, 21, 11, 4, 9, 31]],
    2: [[30, 31, 32, 33, 34, 35, 36, 37, 38]],
    5: [[13], [14, 9, 8, 7, 6, 5, 4]],
}
PROMPTS = [prompt for members in GROUPS.values() for prompt in members]


@pytest.fixture(scope="module")
def model():
    return sharpen(tiny_model(V, dtype=torch.float64)).eval()


def request(prompt, group=0, member=0, turn=0, seed=1, iteration=2):
    return Request([prompt[:2], prompt[2:]], NoiseKey(seed, iteration, group, member, turn), f"row 'r{group}'")


def requests():
    return [request(prompt, g, m) for g, members in GROUPS.items() for m, prompt in enumerate(members)]


def engine(model, eos=EOS, pad=PAD, new=NEW, **options):
    return TransformersEngine(Policy(model), eos, pad, new, **options)


def plain_logprobs(model, prompt, completion, temperature=1.0):
    """Log-probabilities of a completion by transformers' own call on the whole sequence: no cache, no padding."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = torch.log_softmax(logits / temperature, dim=-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(completion)[:, None]).squeeze(1).tolist()


def worst_gap(model, requests, completions, temperature=1.0):
    return max(
        abs(recorded - expected)
        for r, c in zip(requests, completions, strict=True)
        for recorded, expected in zip(
            c.behavior_logprobs, plain_logprobs(model, r.prompt_ids, c.ids, temperature), strict=True
        )
    )


class Seen:
    """What really passes through the model: the ids of every call of its input embedding."""

    def __init__(self, model):
        self.calls = []
        self.hook = model.get_input_embeddings().register_forward_hook(
            lambda module, inputs, output: self.calls.append(inputs[0].clone())
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.hook.remove()

    @property
    def shapes(self):
        return [tuple(ids.shape) for ids in self.calls]

    def real(self, calls=slice(None)):
        return sum(int((ids != PAD).sum()) for ids in self.calls[calls])


# ---- tokens and log-probabilities ----


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_logprobs_equal_a_plain_full_forward(model, temperature):
    sampled = engine(model, temperature=temperature).generate(requests())
    assert worst_gap(model, requests(), sampled, temperature) < 1e-10
    # The wrong answers are far away: another temperature, or one neighbour's prompt in the place of the own.
    assert worst_gap(model, requests(), sampled, temperature * 1.1) > 0.01
    assert worst_gap(model, [requests()[1], *requests()[1:]], sampled, temperature) > 0.1


def test_tokens_follow_from_the_noise_by_inversion_of_the_plain_distribution(model):
    for r, completion in zip(requests(), engine(model).generate(requests()), strict=True):
        ids = []
        for uniform in noise_stream(r.key, NEW):
            with torch.no_grad():
                probabilities = model(input_ids=torch.tensor([r.prompt_ids + ids])).logits[0, -1].softmax(-1)
            token, mass = 0, float(probabilities[0])
            while mass <= uniform:
                token += 1
                mass += float(probabilities[token])
            ids.append(token)
            if token in EOS:
                break
        assert completion.ids == ids


def test_several_eos_ids_finish_reasons_and_rows_that_end_early(model):
    sampled = engine(model).generate(requests())
    lengths = [len(c.ids) for c in sampled]
    assert len(set(lengths)) >= 4 and NEW in lengths  # rows do end at different positions
    assert len({c.ids[-1] for c in sampled if c.finish_reason == "eos"}) >= 2  # on several of the EOS ids
    for completion in sampled:
        assert not set(completion.ids[:-1]) & set(EOS) and len(completion.behavior_logprobs) == len(completion.ids)
        assert (completion.ids[-1] in EOS) == (completion.finish_reason == "eos")
        assert completion.finish_reason == "eos" or len(completion.ids) == NEW
    # Nobody is shifted by a neighbour that left: every row's tokens are those it gets alone.
    for r, completion in zip(requests(), sampled, strict=True):
        alone = engine(model).generate([r])[0]
        assert alone.ids == completion.ids and alone.finish_reason == completion.finish_reason
        assert alone.behavior_logprobs == pytest.approx(completion.behavior_logprobs, abs=1e-10)


def test_completion_cut_by_length(model):
    r, whole = next(
        (r, c)
        for r in requests()
        if (c := engine(model).generate([r])[0]).finish_reason == "eos" and 3 <= len(c.ids) < NEW
    )
    exact = engine(model, new=len(whole.ids)).generate([r])[0]  # the EOS is the last token that was allowed
    assert (exact.ids, exact.finish_reason) == (whole.ids, "eos")
    short = engine(model, new=len(whole.ids) - 1).generate([r])[0]
    assert (short.ids, short.finish_reason) == (whole.ids[:-1], "length")
    assert engine(model, eos=[]).generate([r])[0].finish_reason == "length"  # without EOS ids nothing ends


def test_eos_may_equal_pad(model):
    apart, equal = engine(model).generate(requests()), engine(model, pad=EOS[0]).generate(requests())
    assert [c.ids for c in equal] == [c.ids for c in apart]
    assert [c.finish_reason for c in equal] == [c.finish_reason for c in apart]
    assert worst_gap(model, requests(), equal) < 1e-10
    ended = [c for c in equal if c.finish_reason == "eos"]
    assert ended and all(sum(token in EOS for token in c.ids) == 1 for c in ended)  # the EOS itself stays, once


def test_order_of_requests_changes_nothing(model):
    straight = engine(model).generate(requests())
    order = [5, 0, 7, 3, 1, 6, 2, 4]
    shuffled = engine(model).generate([requests()[i] for i in order])
    assert [c.ids for c in shuffled] == [straight[i].ids for i in order]
    assert engine(model).generate([]) == []


def test_sampling_leaves_torch_generator_alone_and_sees_new_weights():
    changing = sharpen(tiny_model(V, dtype=torch.float64))
    one = engine(changing)
    state = torch.get_rng_state()
    before = one.generate(requests())
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        changing.model.layers[0].mlp.down_proj.weight.mul_(2)
        changing.lm_head.weight.mul_(1.5)
    after = one.generate(requests())
    assert worst_gap(changing, requests(), after) < 1e-10 and worst_gap(changing, requests(), before) > 0.01


# ---- shared prefixes ----


def test_shared_prefill_gives_the_same_and_computes_each_prefix_once(model):
    sharing, apart = engine(model), engine(model, share_prefix=False)
    with Seen(model) as with_sharing:
        shared = sharing.generate(requests())
    with Seen(model) as without:
        plain = apart.generate(requests())
    assert [c.ids for c in shared] == [c.ids for c in plain]
    for a, b in zip(shared, plain, strict=True):
        assert a.behavior_logprobs == pytest.approx(b.behavior_logprobs, abs=1e-10)
    assert PAD not in {token for c in shared for token in c.ids}  # so PAD marks padding in what follows
    # Prompts hold 9+11+7, 6+6, 9 and 1+7 = 56 tokens. Groups 0 and 1 share 6 and 2: these 8 once, then the suffixes
    # 3+5+1, 4+4, 9, 1+7 = 34. Together 42: 6*2 + 2*1 = 14 fewer than 56.
    assert with_sharing.shapes[0] == (1, 42) and without.shapes[0] == (8, 11)
    assert with_sharing.real(slice(0, 1)) == 42
    assert without.real(slice(0, 1)) == 56
    # Every sampled token but a row's last is computed once more.
    decoded = sum(len(c.ids) - 1 for c in shared)
    assert with_sharing.real(slice(1, None)) == without.real(slice(1, None)) == decoded
    assert (sharing.counts.prefix, sharing.counts.suffix, sharing.counts.decode) == (8, 34, decoded)
    assert (apart.counts.prefix, apart.counts.suffix, apart.counts.decode) == (0, 56, decoded)
    assert sharing.counts.total == with_sharing.real() and apart.counts.total == without.real()


def test_identical_prompts_share_all_but_the_last_token(model):
    prompt = [4, 5, 6, 8, 9, 10, 12, 13, 14]
    with Seen(model) as seen:
        sampled = engine(model, eos=[]).generate([request(prompt, 3, member) for member in range(4)])
    # 8 tokens once, then the last one of 4 members, then 7 decoding steps of 4: 8 + 4 + 28; 36 + 28 without sharing.
    assert seen.shapes == [(1, 12)] + [(4, 1)] * 7
    assert len({tuple(c.ids) for c in sampled}) == 4  # noise of their own
    assert worst_gap(model, [request(prompt)] * 4, sampled) < 1e-10


def test_groups_at_other_turns_or_of_other_ids_are_not_mixed(model):
    prompt = [4, 5, 6, 8, 9]
    with Seen(model) as seen:
        engine(model, new=1).generate([request(prompt, 0, 0), request(prompt, 0, 1, turn=1), request(prompt, 1, 0)])
    assert seen.shapes == [(1, 15)]  # three groups of one member each


def test_one_token_prompts(model):
    asked = [request([9], 0, member) for member in range(3)] + [request([4, 5, 6], 1)]
    sampled = engine(model).generate(asked)
    assert worst_gap(model, asked, sampled) < 1e-10
    assert [c.ids for c in sampled] == [engine(model).generate([r])[0].ids for r in asked]


def test_common_prefix_length():
    assert common_prefix_length([[1, 2, 3], [1, 2, 4]]) == 2
    assert common_prefix_length([[1, 2, 3], [1, 2, 3]]) == 2  # not 3: one token must be left to predict from
    assert common_prefix_length([[1, 2], [1, 2, 3], [1, 2, 9]]) == 1  # bounded by the shortest
    assert common_prefix_length([[1, 2, 3, 9], [1, 5, 3, 9], [1, 2, 3, 8]]) == 1  # of all: first and last share 3
    assert common_prefix_length([[7], [8]]) == 0
    assert common_prefix_length([[4, 4, 4]]) == 2


@pytest.mark.parametrize("budget", [1, 40, 60, 100, 262144])
def test_packing_into_batches_changes_nothing(model, budget):
    whole = engine(model).generate(requests())
    one = engine(model, rollout_batch_tokens=budget, share_prefix=False)
    with Seen(model) as seen:
        packed = one.generate(requests())
    assert [c.ids for c in packed] == [c.ids for c in whole]
    for a, b in zip(packed, whole, strict=True):
        assert a.behavior_logprobs == pytest.approx(b.behavior_logprobs, abs=1e-10)
    prefills = [shape for shape in seen.shapes if shape[1] > 1]
    # Rows x (longest prompt + 8 new tokens): groups of 3 x 19 = 57, 1 x 17, 2 x 15 = 30, 2 x 14 = 28, longest first.
    expected = {
        1: [(3, 11), (1, 9), (2, 7), (2, 6)],
        40: [(3, 11), (1, 9), (2, 7), (2, 6)],  # 17 + 2 more rows of 17 = 51 > 40
        60: [(3, 11), (3, 9), (2, 6)],
        100: [(4, 11), (4, 7)],  # 4 x 19 = 76, with 2 more 114 > 100; 4 x 15 = 60
        262144: [(8, 11)],
    }
    assert prefills == expected[budget]
    assert one.counts.suffix == 56


def test_a_shared_prefix_takes_its_room_once(model):
    # By length: groups 0, 2, 5, 1. Group 0 holds 6 shared tokens, then 3 rows of 5 + 8 new ones at most: 6 + 39 = 45.
    # Group 2 (one row of 9) makes it 2 prefixes of 6 and 4 rows of 9 + 8: 12 + 68 = 80, group 5 (two rows) 18 + 102 =
    # 120, group 1 (two rows) 24 + 136 = 160; without sharing all takes 8 x 19 = 152 at a time. Group 5 holds 2 x 15 =
    # 30, with group 1 2 x 2 + 4 x 15 = 64; groups 2 and 5 hold 3 x 17 = 51.
    sizes = {44: [1, 1, 1, 1], 64: [1, 2, 1], 80: [2, 2], 119: [2, 2], 120: [3, 1], 160: [4]}
    for budget, expected in sizes.items():
        one = engine(model, rollout_batch_tokens=budget)
        prompts = [r.prompt_ids for r in requests()]
        keys = [r.key.group for r in requests()]
        groups = [[i for i, key in enumerate(keys) if key == group] for group in dict.fromkeys(keys)]
        packed = one._pack(groups, prompts)
        assert [len(batch) for batch in packed] == expected, budget


# ---- errors ----


def test_empty_and_too_long_prompts_name_the_row(model):
    with pytest.raises(ValueError, match=r"row 'r4', turn 0: the prompt has 0 tokens, expected 1 to"):
        engine(model).generate([request([4, 5]), request([], 4)])
    long = engine(model, max_prompt_length=6)
    assert len(long.generate([request([4] * 6)])) == 1
    with pytest.raises(ValueError, match=r"row 'r9', turn 3: the prompt has 7 tokens.*max_prompt_length=6"):
        long.generate([request([4] * 6), request([4] * 7, 9, turn=3)])


def test_nonfinite_logits_are_an_error_that_says_so():
    broken = tiny_model(V)
    with torch.no_grad():
        broken.model.norm.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="row 'r0'"):
        engine(broken).generate([request([4, 5, 6])])


# ---- architectures, precision, modes ----

COMMON = SIZES | {"vocab_size": V}
GPT2 = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 3}
GEMMA2 = {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 5.0}
ARCHITECTURES = {  # config, attention, precision, tolerance, can share a prefix
    "llama": (LlamaConfig(**COMMON), "sdpa", torch.float64, 1e-10, True),
    "llama eager": (LlamaConfig(**COMMON), "eager", torch.float32, 1e-5, True),
    "gpt2": (GPT2Config(**GPT2, eos_token_id=3), "sdpa", torch.float64, 1e-10, True),
    "mistral, window of 4": (MistralConfig(**COMMON, sliding_window=4), "sdpa", torch.float64, 1e-10, False),
    "qwen2, window of 4 in one layer": (
        Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=4, max_window_layers=1),
        "sdpa",
        torch.float64,
        1e-10,
        False,
    ),
    # Eager attention takes its softmax in float32, and is the only one of Gemma 2.
    "gemma2": (Gemma2Config(**COMMON, **GEMMA2, sliding_window=5), "eager", torch.float32, 1e-5, False),
}


def build(config, attention="eager", dtype=torch.float32):
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype)
    return sharpen(built).eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name):
    config, attention, dtype, tolerance, can_share = ARCHITECTURES[name]
    built = build(config, attention, dtype)
    one = engine(built, temperature=0.8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sampled = one.generate(requests())
        one.generate(requests()[:1])
    told = [w for w in caught if "cannot share a prefix" in str(w.message)]
    assert len(told) == (0 if can_share else 1)  # said once, and prompts are computed apart from there on
    assert (one.counts.prefix > 0) == can_share
    assert worst_gap(built, requests(), sampled, 0.8) < tolerance
    assert worst_gap(built, [request(p[1:] or [5]) for p in PROMPTS], sampled, 0.8) > 0.01  # a lost token shows
    alone = engine(built, temperature=0.8, share_prefix=False)
    assert [alone.generate([r])[0].ids for r in requests()] == [c.ids for c in sampled]


def test_hybrid_architecture():
    linear = {f"linear_{side}_head_dim": 8 for side in ("key", "value")}
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "full_attention_interval": 2, "head_dim": 8}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    built = build(Qwen3NextConfig(**COMMON, **linear, **experts, shared_expert_intermediate_size=8))
    sampled = engine(built, share_prefix=False).generate(requests())
    assert worst_gap(built, requests(), sampled) < 1e-5


def test_positions_by_place_in_the_cache():
    """MPT counts its ALiBi distances over padding: the probe finds out, and goes on without sharing."""
    built = build(MptConfig(vocab_size=V, d_model=32, n_layers=2, n_heads=4, max_seq_len=64))
    sampler = engine(built)
    with pytest.warns(UserWarning, match="MptForCausalLM cannot share a prefix"):
        sampler.verify()
    sampled = sampler.generate(requests())
    assert worst_gap(built, requests(), sampled) < 1e-5


def test_an_architecture_whose_cache_ignores_masks_is_refused_by_name():
    built = build(MambaConfig(vocab_size=V, hidden_size=32, state_size=8, num_hidden_layers=2))
    with (
        pytest.warns(UserWarning, match="share"),
        pytest.raises(ValueError, match="MambaForCausalLM is not supported"),
    ):
        engine(built).verify()


@pytest.mark.parametrize("share_prefix", [True, False])
def test_a_supported_architecture_passes_the_probe_in_silence(share_prefix, recwarn):
    for dtype in (torch.float32, torch.bfloat16):
        sampler = engine(tiny_model(V, dtype=dtype), share_prefix=share_prefix)
        sampler.verify()
        assert sampler.share_prefix is share_prefix and sampler.counts.total == 0
    assert [w for w in recwarn if issubclass(w.category, UserWarning)] == []


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_left_padding_never_leaks(attention):
    built = build(LlamaConfig(**COMMON), attention)
    with torch.no_grad():  # a padding token that poisons whatever attends to it
        built.get_input_embeddings().weight[PAD] = 1e3
    prompts = [[4, 5, 6] * 4, [9], [20, 21], [8, 9, 10, 12, 13, 14]]
    asked = [request(p, g, m) for g, p in enumerate(prompts) for m in range(2)]
    sampled = engine(built).generate(asked)
    assert worst_gap(built, asked, sampled) < 1e-5


def test_bfloat16_runs_and_records_full_precision():
    low = build(LlamaConfig(**COMMON), "sdpa", torch.bfloat16)
    sampled = engine(low).generate(requests())
    assert [len(c.ids) for c in sampled] == [len(c.behavior_logprobs) for c in sampled]
    # Logits and their normaliser are float32: rounded to bfloat16 every log-probability would stay as it is.
    values = torch.tensor([value for c in sampled for value in c.behavior_logprobs])
    assert (values.bfloat16().float() != values).float().mean() > 0.9
    assert worst_gap(low, requests(), sampled) < 0.25  # bfloat16 keeps 8 bits: 2^-8 of logits up to about 10


def test_gradient_checkpointing_in_train_mode(model):
    checkpointed = sharpen(tiny_model(V, dtype=torch.float64, attention_dropout=0.5))
    checkpointed.gradient_checkpointing_enable()
    checkpointed.train()
    sampled = engine(checkpointed).generate(requests())  # in eval mode: no dropout, no checkpoints, the cache works
    assert checkpointed.training and checkpointed.model.layers[0].mlp.training
    assert [c.ids for c in sampled] == [c.ids for c in engine(model).generate(requests())]
    assert all(parameter.grad is None for parameter in checkpointed.parameters())


# ---- noise ----


def test_noise_is_fixed_for_ever():
    # Literal: a run that is resumed on another version must draw the same tokens.
    assert noise_stream(NoiseKey(7, 3, 2, 1, 4), 4).tolist() == [
        0.5415017740034269,
        0.7566202666793322,
        0.6427398739619603,
        0.5829648392579679,
    ]
    assert noise_stream(NoiseKey(0, -1, 0, 0, 0), 2).tolist() == [0.46675370923701165, 0.9635627920537193]


def test_noise_depends_on_key_and_position_alone():
    key = NoiseKey(7, 3, 2, 1, 4)
    assert noise_stream(key, 50)[:4].tolist() == noise_stream(key, 4).tolist()
    assert noise_stream(NoiseKey(*map(np.int64, key)), 4).tolist() == noise_stream(key, 4).tolist()
    keys = [key, *(key._replace(**{name: getattr(key, name) + 1}) for name in key._fields)]
    keys += [NoiseKey(3, 7, 2, 1, 4), NoiseKey(7, 3, 2, 4, 1), NoiseKey(73, 2, 1, 4, 0), NoiseKey(7, 32, 1, 4, 0)]
    assert len({noise_stream(k, 1)[0] for k in keys}) == len(keys) == 10
    pooled = np.concatenate([noise_stream(NoiseKey(0, 0, g, m, 0), 64) for g in range(16) for m in range(16)])
    assert 0 <= pooled.min() and pooled.max() < 1
    # 16,384 draws in 16 bins of 1,024, standard deviation 31: 6 of them at most.
    assert np.abs(np.histogram(pooled, 16, (0, 1))[0] - 1024).max() < 186


# ---- the sampler ----


def sweep(probabilities, steps, **options):
    """Counts of every token over an even sweep of uniforms, and the log-probability recorded for each."""
    logits = torch.tensor(probabilities, dtype=torch.float64).log().expand(steps, -1)
    uniforms = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    tokens, logprobs = sample_tokens(logits, uniforms, **options)
    recorded = {int(t): round(float(x), 6) for t, x in zip(tokens, logprobs, strict=True)}
    return torch.bincount(tokens, minlength=len(probabilities)).tolist(), recorded


PROBABILITIES = [0.0, 0.1, 0.2, 0.0, 0.3, 0.4, 0.0]


def test_sampler_counts_equal_probabilities():
    counts, recorded = sweep(PROBABILITIES, 1000)
    assert counts == [0, 100, 200, 0, 300, 400, 0]
    assert recorded == {1: -2.302585, 2: -1.609438, 4: -1.203973, 5: -0.916291}  # ln 0.1, 0.2, 0.3, 0.4


def test_sampler_temperature():
    # Temperature 0.5 squares: 0.01, 0.04, 0.09, 0.16 of 0.30.
    counts, recorded = sweep(PROBABILITIES, 3000, temperature=0.5)
    assert counts == [0, 100, 400, 0, 900, 1600, 0]
    assert recorded == {1: -3.401197, 2: -2.014903, 4: -1.203973, 5: -0.628609}  # ln 1/30, 4/30, 9/30, 16/30


def test_sampler_nucleus():
    # 0.4 + 0.3 reach 0.65: those two, at 4/7 and 3/7; recorded is still the full distribution, ln 0.3 and ln 0.4.
    counts, recorded = sweep(PROBABILITIES, 700, top_p=0.65)
    assert counts == [0, 0, 0, 0, 300, 400, 0]
    assert recorded == {4: -1.203973, 5: -0.916291}  # not ln 3/7 = -0.847, ln 4/7 = -0.560
    assert sweep(PROBABILITIES, 900, top_p=0.75)[0] == [0, 0, 200, 0, 300, 400, 0]
    assert sweep(PROBABILITIES, 10, top_p=1e-9)[0] == [0, 0, 0, 0, 0, 10, 0]  # the most probable always stays


def test_nucleus_by_hand():
    rows = torch.tensor([[0.1, 0.5, 0.4], [0.1, 0.5, 0.4], [0.25, 0.25, 0.5]], dtype=torch.float64)
    assert nucleus(rows[:1], 0.5).tolist() == [[0.0, 0.5, 0.0]]  # 0.5 alone reaches 0.5
    assert nucleus(rows[1:2], 0.51).tolist() == [[0.0, 0.5, 0.4]]
    assert nucleus(rows[2:], 0.6).tolist() == [[0.25, 0.0, 0.5]]  # of equals the first, not both
    assert nucleus(rows, 0.95).tolist() == rows.tolist()


def test_sampler_greedy():
    counts, recorded = sweep(PROBABILITIES, 50, temperature=0)
    assert counts == [0, 0, 0, 0, 0, 50, 0]
    assert recorded == {5: -0.916291}  # at temperature 1: ln 0.4, not ln 1
    assert sweep(PROBABILITIES, 50, temperature=0, top_p=0.5)[0] == counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sampler_at_the_edges(dtype):
    logits = torch.tensor([PROBABILITIES], dtype=dtype).log().repeat(3, 1)
    edges = torch.tensor([0.0, math.nextafter(1.0, 0.0), math.nextafter(0.1, 0.0)], dtype=torch.float64)
    # Token 0 and token 6 have no probability: u = 0 must not take the first, u just below 1 not the last.
    assert sample_tokens(logits, edges)[0].tolist()[:2] == [1, 5]
    uniforms = torch.full((64,), math.nextafter(1.0, 0.0), dtype=torch.float64)
    many = torch.randn(64, 1000, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 5
    many[:, 990:] = -torch.inf
    assert int(sample_tokens(many, uniforms)[0].max()) < 990
    assert int(sample_tokens(many, uniforms, top_p=0.9)[0].max()) < 990


def test_engine_is_greedy_at_temperature_0_whatever_the_noise(model):
    asked = [request(PROMPTS[0], 0, 0, seed=1), request(PROMPTS[0], 0, 0, seed=2)]
    first, second = (engine(model, temperature=0.0).generate([r])[0] for r in asked)
    assert first == second
    for position, token in enumerate(first.ids):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([PROMPTS[0] + first.ids[:position]])).logits[0, -1]
        assert token == int(logits.argmax())
    assert worst_gap(model, asked[:1], [first]) < 1e-10
