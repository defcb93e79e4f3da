"""The rival of scripts/bench_grpo.py: TRL's GRPOTrainer, on a CPU in float32, without jax."""

import argparse
import json
import tempfile
from types import SimpleNamespace
from typing import Any

import datasets
import tokenizers
import torch
import transformers
import trl
from bench_grpo import RATE, REWARDED, Turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", required=True, help="JSON")
    parser.add_argument("--dtype", required=True)
    args = parser.parse_args()
    size = SimpleNamespace(**json.loads(args.size))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.width,
        num_hidden_layers=size.depth,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        intermediate_size=size.hidden,
        max_position_embeddings=size.prompt_tokens + size.new_tokens,
        tie_word_embeddings=True,
    )
    words = {"<end>": 0} | {f"w{n}": n for n in range(1, size.vocab)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<end>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<end>", pad_token="<end>"
    )
    draw = torch.randint(1, size.vocab, (8 * size.prompts, size.prompt_tokens)).tolist()
    prompts = [" ".join(f"w{n}" for n in row) for row in draw]

    def reward(completions: list[str], **_: Any) -> list[float]:
        """Return 1 for a text with one of the rewarded ids."""
        ids = [[int(word[1:]) for word in text.split()] for text in completions]
        return [float(any(n % REWARDED == 0 for n in each)) for each in ids]

    settings = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=args.dtype == "bfloat16",
        gradient_checkpointing=False,
        per_device_train_batch_size=size.prompts * size.samples,
        num_generations=size.samples,
        max_completion_length=size.new_tokens,
        max_steps=1000,
        learning_rate=RATE,
        beta=0.0,
        temperature=1.0,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    turns = Turns()

    class Callback(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop = turns.ended()
            return control

    class Trainer(trl.GRPOTrainer):
        def _generate(self, *args: Any, **named: Any) -> Any:
            with turns.drawing():
                return super()._generate(*args, **named)

    trainer = Trainer(
        transformers.LlamaForCausalLM(config),
        reward,
        settings,
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[Callback()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
