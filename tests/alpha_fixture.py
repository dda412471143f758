"""A tiny gated reader with a noisy update gate, trained by TurnGRPOTrainer under several mixes of advantage."""

import copy
import os
import random
import sys
import tempfile
import time

import datasets
import torch
import torch.nn.functional as F
from tiny import tiny_model, word_tokenizer
from tokenizers import decoders

from turngrpo.rewards import answer_reward, exit_reward, format_reward, update_reward
from turngrpo.trainer import GatedMemory, TurnGRPOConfig, TurnGRPOTrainer
from turngrpo.trainer.rollout import Turn

E = lambda k, d: type(d)(os.environ.get(k, d))
KEYS = [f"k{i}" for i in range(E("NK", 6))]
VALUES = [f"v{i}" for i in range(6)]
FILLER = [f"w{i}" for i in range(6)]
EMPTY = "No memory yet."
TAGS = "<section> </section> <memory> </memory> <question> </question>"
CHUNKS, EVIDENCE = 4, 2
NOISE = E("NOISE", 0.35)
UPDATES, LEARNING_RATE = 50, E("LR", 5e-4)
SFT_ROWS, SFT_STEPS, SFT_BATCH, SFT_LR = E("SFT_ROWS", 3000), E("SFT_STEPS", 300), E("SFT_B", 64), E("SFT_LR", 3e-3)
MODEL = dict(
    hidden_size=E("H", 64), intermediate_size=2 * E("H", 64), num_hidden_layers=E("L", 2), initializer_range=0.1
)
WORKFLOW = dict(instruction="Read")
LOSS = E("LOSS", "group")


def make_row(rng):
    key = rng.choice(KEYS[: E("NQ", 1)])
    where = rng.sample(range(CHUNKS), EVIDENCE)
    chunks, values = [], []
    for k in range(CHUNKS):
        about = key if k in where else rng.choice([other for other in KEYS if other != key])
        value = rng.choice(VALUES)
        if k in where:
            values.append(value)
        words = [rng.choice(FILLER) for _ in range(E("NF", 4))]
        at = rng.randrange(len(words) + 1)
        chunks.append({"text": " ".join([*words[:at], about, value, *words[at:]]), "evidence": k in where})
    return {"question": key, "answers": [" ".join(values)], "chunks": chunks}


def make_tokenizer():
    tokenizer = word_tokenizer(" ".join([*KEYS, *VALUES, *FILLER, EMPTY, TAGS, "Read"]))
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # words apart by a space
    return tokenizer


def gold_turn(state, rng, noise):
    old = "" if state.memory == EMPTY else state.memory
    if state.answering:
        return f"\\boxed{{ {old} }}"
    chunk = state.chunks[state.chunk]
    check = chunk["evidence"] != (rng.random() < noise)
    new = old
    if chunk["evidence"]:
        new = f"{old} {next(word for word in chunk['text'].split() if word in VALUES)}".strip()
    candidate = (new or EMPTY) if check else ""
    end = check and chunk["evidence"] and len(new.split()) >= EVIDENCE
    return (
        f"<check> {'yes' if check else 'no'} </check> <update> {candidate} </update> "
        f"<next> {'end' if end else 'continue'} </next>"
    )


def gold_turns(workflow, tokenizer, rng, noise):
    state, goes_on, samples = workflow.start(make_row(rng)), True, []
    while goes_on:
        prompt = [token for segment in workflow.prompt(state) for token in segment]
        text = gold_turn(state, rng, noise)
        completion = [*workflow.chat.encode_text(text), tokenizer.eos_token_id]
        samples.append((prompt, completion))
        goes_on = workflow.advance(state, Turn(1, prompt, completion, [], "eos", text))
    return samples


def config(**overrides):
    values = dict(
        output_dir=tempfile.mkdtemp(),
        max_steps=UPDATES,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        per_device_train_batch_size=32,
        per_device_eval_batch_size=128,
        gradient_accumulation_steps=1,
        num_generations=8,
        num_generations_eval=2,
        max_completion_length=20,
        max_prompt_length=128,
        max_memory_tokens=8,
        beta=0.0,
        loss_type=LOSS,
        scale_rewards="none",
        eval_top_p=1.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=10,
        disable_tqdm=True,
        max_tokens_per_microbatch=1 << 20,
    )
    return TurnGRPOConfig(**(values | overrides))


def warm_start(seed, verbose=False):
    tokenizer, rng = make_tokenizer(), random.Random(seed)
    workflow = GatedMemory(**WORKFLOW)
    workflow.bind(tokenizer, config())
    vocabulary = tokenizer.get_vocab()
    words = lambda text: [vocabulary.get(w, 0) for w in text.split()]
    workflow.chat.encode_text = words
    t0 = time.time()
    pool = [
        [s for _ in range(SFT_ROWS) for s in gold_turns(workflow, tokenizer, rng, noise)] for noise in (0.0, NOISE)
    ]
    if verbose:
        print("data", time.time() - t0, len(pool[0]), max(len(p) + len(c) for p, c in pool[1]))
    model = tiny_model(len(tokenizer), seed=seed, **MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=SFT_LR, betas=(0.9, 0.99), weight_decay=0.0)
    clean = int(SFT_STEPS * E("CLEAN", 0.35))
    for step in range(SFT_STEPS):
        lr = SFT_LR * min(1, (step + 1) / 50) * max(0.02, 1 - step / SFT_STEPS)
        for g in optimizer.param_groups:
            g["lr"] = lr
        batch = rng.sample(pool[step >= clean], SFT_BATCH)
        width = max(len(p) + len(c) for p, c in batch)
        ids = torch.tensor([p + c + [1] * (width - len(p) - len(c)) for p, c in batch])
        labels = torch.tensor([[-100] * len(p) + c + [-100] * (width - len(p) - len(c)) for p, c in batch])
        mask = torch.tensor([[1] * (len(p) + len(c)) + [0] * (width - len(p) - len(c)) for p, c in batch])
        logits = model(input_ids=ids, attention_mask=mask).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if verbose and (step % 50 == 49):
            print(step, round(loss.item(), 4), round(time.time() - t0, 1))
    return model, tokenizer


def flipped(*args, **kw):
    return [[None if r is None else -r for r in row] for row in update_reward(*args, **kw)]


def run(seed, model, tokenizer, alpha, turn_reward=update_reward, train=True):
    rng = random.Random(seed + 1000)
    rows = datasets.Dataset.from_list([make_row(rng) for _ in range(256)])
    held = datasets.Dataset.from_list([make_row(rng) for _ in range(128)])
    trainer = TurnGRPOTrainer(
        model=copy.deepcopy(model),
        reward_funcs=[answer_reward, exit_reward, format_reward],
        args=config(alpha=alpha, seed=seed),
        train_dataset=rows,
        eval_dataset=held,
        processing_class=tokenizer,
        workflow=GatedMemory(**WORKFLOW),
        turn_reward_funcs=turn_reward,
    )
    from transformers.trainer_callback import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    if train:
        trainer.train()
        if os.environ.get("HIST"):
            for h in trainer.state.log_history:
                if "update_accuracy/evidence" in h:
                    print(
                        "   ",
                        h["step"],
                        *[
                            round(h[k], 2)
                            for k in (
                                "update_accuracy/evidence_free",
                                "update_accuracy/evidence",
                                "answer/accuracy",
                                "format/parsed",
                                "clip/active",
                                "grad_norm",
                            )
                        ],
                    )
    m = trainer.evaluate()
    keys = [
        "update_accuracy/evidence_free",
        "update_accuracy/evidence",
        "answer/accuracy",
        "format/parsed",
        "exit/exact",
        "exit/early",
        "turns/mean",
    ]
    return {k: round(m["eval_" + k], 3) for k in keys}, trainer


if __name__ == "__main__":
    torch.set_num_threads(1)
    for seed in map(int, sys.argv[1].split(",")):
        t0 = time.time()
        cache = f"/tmp/warm_{os.environ.get('TAG', 'x')}_{seed}.pt"
        if os.path.exists(cache):
            model, tok = torch.load(cache, weights_only=False), make_tokenizer()
        else:
            model, tok = warm_start(seed, verbose=len(sys.argv) > 2)
            torch.save(model, cache)
        print("seed", seed, "warm", round(time.time() - t0, 1), flush=True)
        arms = [("start", 1.0, update_reward, False)]
        if "warm" not in sys.argv:
            arms += [
                ("a=1", 1.0, update_reward, True),
                ("a=.9", 0.9, update_reward, True),
                ("flip", 0.9, flipped, True),
            ]
        for name, alpha, tr, train in arms:
            t0 = time.time()
            m, _ = run(seed, model, tok, alpha, tr, train)
            print(f"{name:6}", *m.values(), round(time.time() - t0, 1), flush=True)
