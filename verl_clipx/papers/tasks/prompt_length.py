"""Command line: `python -m verl_clipx.papers.tasks.prompt_length MODEL FILE …` prints the length of the longest prompt.

verl pads every prompt to `data.max_prompt_length`. With this number, no prompt is padded beyond the longest one.
"""

from pathlib import Path
from typing import Annotated

import typer
from transformers import AutoTokenizer

from verl_clipx.common.files import read_table


def main(
    model: Annotated[str, typer.Argument(help="The model's folder, or its id on the hub.")],
    files: Annotated[list[Path], typer.Argument(help="Parquet files in verl's schema.")],
) -> None:
    """Print the length of the longest prompt, in tokens of the model and under its chat template."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        prompts = []
        for file in files:
            prompts += read_table(file, ["prompt"])["prompt"].to_pylist()
        texts = []
        for prompt in prompts:
            texts.append(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False))
        token_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        typer.echo(max(map(len, token_ids)))
    except (OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
