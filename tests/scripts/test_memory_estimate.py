"""The memory of one GPU on paper, by hand for Qwen2.5-3B, and the batches that keep an iteration the same."""

import memory_estimate
import pytest
import torch
from jobs import gpu_memory
from peft import LoraConfig
from tiny import tiny_model
from transformers import AutoModelForCausalLM, Qwen2Config

from turngrpo.trainer import TurnGRPOConfig

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_sizes_of_qwen_3b():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**memory_estimate.QWEN2_5_3B))
    sizes = gpu_memory.model_sizes(model, LoraConfig(r=16, target_modules=PROJECTIONS))
    # Embedding 151936 * 2048; 36 layers of q 2048 * 2048 + 2048, k and v 2048 * 256 + 256, o 2048 * 2048, three of
    # 2048 * 11008, two norms; one norm at the end. Untied it would be 311,164,928 more.
    assert sizes.parameters == 311_164_928 + 36 * (4_196_352 + 2 * 524_544 + 4_194_304 + 67_633_152 + 4_096) + 2_048
    assert sizes.parameters == 3_085_938_688
    # 16 * (in + out): q, o 65536, k, v 36864, gate, up, down 208896 in each of 36 layers.
    assert sizes.trained == 36 * (2 * 65_536 + 2 * 36_864 + 3 * 208_896) == 29_933_568
    assert (sizes.attention, sizes.keys) == (2048, 256)


def config(folder, **options):
    size = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 10, "beta": 0.1}
    size |= {"max_tokens_per_microbatch": 100, "rollout_batch_tokens": 1000, "gradient_checkpointing": True}
    return TurnGRPOConfig(str(folder), report_to="none", use_cpu=True, bf16=False, **(size | options))


def test_parts_by_hand(tmp_path):
    # 2 layers, hidden 32, 4 heads of 8, 2 key heads: keys 16 wide; intermediate 64, vocabulary 50.
    sizes = gpu_memory.model_sizes(tiny_model(50))
    assert (sizes.layers, sizes.hidden, sizes.attention, sizes.keys, sizes.intermediate) == (2, 32, 32, 16, 64)
    parts = gpu_memory.memory_parts(sizes, config(tmp_path), 2)
    assert list(parts["always"].values()) == [sizes.parameters * 2, sizes.parameters * 12]
    # A token's keys and values: 2 * 16 numbers * 2 layers * 2 bytes = 128; without grouped heads it would be 256.
    assert list(parts["rollout"].values()) == [1000 * 128, 50 * 32 * 4]
    # A layer at work: (5 * 32 + 2 * 32 + 2 * 16 + 4 * 64) * 2 = 1024; inputs of two layers: 2 * 32 * 2 = 128.
    # Reference: 4 * 10 response tokens of 32 * 2 bytes. Head: five tiles of 64 MiB.
    assert list(parts["update"].values()) == [100 * (1024 + 128), 100 * 128 * 2, 40 * 64, 5 * 2**26]
    kept = gpu_memory.memory_parts(sizes, config(tmp_path, gradient_checkpointing=False, beta=0.0), 4)["update"]
    assert list(kept.values())[:3] == [100 * 2 * 2048, 100 * 256 * 2, 0]
    # 4 trajectories of 20 + 10 tokens are 120 to cache, and of 1 turn each 120 to train, where 1000 and 500 may be.
    less = config(tmp_path, max_tokens_per_microbatch=500)
    parts = gpu_memory.memory_parts(sizes, less, 2, longest=20, turns=1)
    assert list(parts["rollout"].values())[0] == 120 * 128
    assert list(parts["update"].values())[:2] == [120 * (1024 + 128), 120 * 128 * 2]
    for turns in (5, None):  # 600 tokens, and nobody knows how many
        update = gpu_memory.memory_parts(sizes, less, 2, longest=20, turns=turns)["update"]
        assert list(update)[0] == "activations of 500 tokens"
    together = {"always": {"a": 5}, "rollout": {"b": 3, "c": 4}, "update": {"d": 6}}
    assert gpu_memory.peak(together) == 12  # all of them at once would be 18


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 128), (4, 32), (8, 16)])
def test_an_iteration_is_the_same_on_any_number_of_gpus(processes, accumulation, tmp_path, monkeypatch):
    fields = memory_estimate.batch_fields(128 * 16, 16, processes)
    assert fields["gradient_accumulation_steps"] == fields["steps_per_generation"] == accumulation
    monkeypatch.setattr(TurnGRPOConfig, "world_size", processes)
    options = {"report_to": "none", "use_cpu": True, "bf16": False, "loss_type": "group"}
    trained = TurnGRPOConfig(str(tmp_path), **options, **fields)
    trained.check_workflow_options()
    assert trained.generation_batch_size == 2048


def test_groups_that_cannot_be_shared_out_are_refused():
    with pytest.raises(ValueError, match="2048 trajectories in groups of 16 cannot be shared out over 3 GPUs"):
        memory_estimate.batch_fields(2048, 16, 3)
