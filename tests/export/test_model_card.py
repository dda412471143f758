"""The model card: metadata that the Hub's own classes read, and text that no name can break."""

import pytest
from huggingface_hub import ModelCard

from turngrpo.trainer.export.model_card import PAPER, model_card

CORPUS = {"name": "tiny corpus", "digest": "ab12", "label_source": "model", "kappa": 0.71, "kappa_items": 200,
          "rows": 12, "projects": 3, "license": "CC-BY-4.0"}  # fmt: skip
FACTS = {
    "name": "reader",
    "version": "v0002",
    "base_model": "owner/tiny",
    "base_revision": "0a1b",
    "update": 30,
    "corpus": CORPUS,
    "config": {"trainer": {"alpha": 0.9, "beta": 0.001}, "script": {"workflow": "gated"}},
}
LORA = {"peft_type": "LORA", "r": 16, "rank_pattern": {"q_proj": 24}}


def card(adapter=LORA, before=None, after=None, **facts):
    return model_card(FACTS | facts, before or {"reward": 0.5}, after or {"reward": 1.25}, adapter)


def test_metadata_is_what_the_hub_reads():
    data = ModelCard(card()).data
    assert data.base_model == "owner/tiny" and data.to_dict()["base_model_relation"] == "adapter"
    assert data.library_name == "peft" and data.pipeline_tag == "text-generation"
    assert data.tags == ["lora", "trl", "grpo", "turngrpo", "arxiv:2602.10560"]
    merged = ModelCard(card(adapter=None)).data
    assert merged.library_name == "transformers" and merged.to_dict()["base_model_relation"] == "finetune"


def test_the_card_says_where_the_adapter_comes_from_and_what_it_reached():
    text = card()
    for part in (
        "TurnGRPO / GRU-Mem",
        f"{PAPER['title']}, [arXiv:2602.10560]",
        "- Base model: owner/tiny, revision 0a1b",
        "- Version: v0002, after 30 updates",
        "- Name: tiny corpus",
        "- SHA-256: `ab12`",
        "- Rows: 12",
        "- Projects: 3",
        "- Labels: model (kappa 0.71 on 200 items)",
        "| reward | 0.5 | 1.25 |",
        "| workflow | gated |",
        "| beta | 0.001 |",
    ):
        assert part in text, part
    bare = model_card({"name": "a", "version": "v0001", "base_model": "b", "base_revision": None}, None, None, LORA)
    assert "Not stated." in bare and "Not measured." in bare
    assert "A LoRA adapter for a gated memory agent" in text and "An adapter for" in card(
        adapter={"peft_type": "LOHA"}
    )
    assert "A LoRA adapter for the workflow AnswerTwice.\n" in card(config={"workflow": "AnswerTwice"})
    computed = card(corpus=CORPUS | {"label_source": "computed", "kappa": None})
    assert "- Labels: computed (computed, no agreement to measure)" in computed


def test_a_metric_that_is_not_finite_or_a_cost_is_no_number():
    text = card(before={"reward": None}, after={"reward": 2.0, "exit/exact": None, "time/generation": 3.0})
    assert "| reward |  | 2 |" in text and "| exit/exact |  |  |" in text and "time/generation" not in text


def test_commands_name_base_revision_rank_and_adapter():
    text = card(name="my reader")
    # Rank 24 (of q_proj, over 16): vLLM takes 16 or 32 and nothing between.
    assert "vllm serve owner/tiny --revision 0a1b --enable-lora --max-lora-rank 32 --lora-modules 'my reader'=" in text
    assert "ln -s $(hf download owner/tiny --revision 0a1b --quiet)/* mounted/" in text


def test_a_local_base_model_is_no_hub_metadata():
    local = f"my base (local, SHA-256 {'0' * 64})"
    text = card(base_model=local, base_revision=None)
    assert "base_model" not in ModelCard(text).data.to_dict()
    assert f"- Base model: {local}. It is not on the Hub: ask whoever trained the adapter for it; `sha256sum" in text
    assert 'vllm serve "$BASE" --enable-lora' in text and 'ln -s "$BASE"/* mounted/' in text
    assert 'PeftModel.from_pretrained(base, os.environ["ADAPTER"])' in text and "AutoPeftModel" not in text
    assert "ask whoever trained the adapter for it\n" in card(base_model="gpt2 (local)", base_revision=None)
    assert "AutoPeftModelForCausalLM" in card()


@pytest.mark.parametrize(
    "option",
    [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [3]}, {"peft_type": "LOHA"}],
)
def test_what_vllm_cannot_mount_is_said(option):
    text = card(adapter=LORA | option)
    assert "--enable-lora" not in text and "export_adapter.py --merge" in text
    assert next(iter(option)) in text


def test_names_cannot_break_the_card():
    corpus = CORPUS | {"name": "a | b\n## Results\n---\n*c*", "label_source": "<b>model</b>"}
    text = card(name="two_|_names", corpus=corpus, after={"a|b\nc": 1.0}, config={"script": {"layout": "x | y"}})
    assert "- Name: a \\| b \\#\\# Results --- \\*c\\*\n" in text
    assert "\\<b\\>model" in text
    assert "| a\\|b c |  | 1 |" in text and "| layout | x \\| y |" in text
    assert "# two\\_\\|\\_names\n" in text
    assert text.count("\n## Results") == 1
    assert ModelCard(text).data.library_name == "peft"


def test_the_card_says_how_the_adapter_reads():
    """Whoever mounts it has to ask in the same words, cut in the same size."""
    instruction = "Read `this`.\n```\nReply with gates.\n```"
    reading = {"workflow": "gated", "layout": "chunk_first", "chunk_size": 77, "exit_gate": None}
    text = card(config={"reading": reading | {"instruction": instruction}})
    assert "| chunk\\_size | 77 |" in text and "exit\\_gate" not in text
    assert f"````text\n{instruction}\n````" in text
    assert "## Reading\n\nNot stated." in card() and "None" not in card(base_revision=None)
