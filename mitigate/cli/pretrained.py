"""Commands of a pretrained model: finetune trains it with a variant, generate lets it continue a prompt."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mitigate import config_files
from mitigate.cli.shared import add_command, check_out
from mitigate.config import ConfigError


def add_finetune(commands: Any) -> None:
    parser = add_command(
        commands, "finetune", _finetune, "fine-tune a pretrained model with a variant; rows before and after, perplexities, a figure and a bundle"
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, see configs/real-model.toml and docs/real-models.md")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the result; a run that was cut short goes on in it")
    parser.add_argument("--model", metavar="NAME_OR_PATH", help="instead of the config's")
    parser.add_argument("--minutes", type=float, help="budget of training time, instead of the config's")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own)")


def _finetune(arguments: argparse.Namespace) -> int:
    check_out(arguments.out)
    wanted = config_files.load_fine_tune(arguments.config, model=arguments.model)
    if arguments.minutes is not None:
        wanted = config_files.replace(wanted, train=config_files.replace(wanted.train, minutes=arguments.minutes))
    _set_threads(arguments.threads)

    from mitigate import before_after
    from mitigate.report import tuning

    try:
        with tuning.progress_bar(wanted.train.updates) as on_update:
            rows, summary = before_after.run(wanted, arguments.out, log=print, on_update=on_update)
    except ConfigError as error:
        if arguments.model is None and str(error).startswith("--model "):  # the loader's word for what the config gave
            raise ConfigError(f"FineTuneConfig.model {str(error).removeprefix('--model ')}") from None
        raise
    print(tuning.table(rows, summary))
    print(f"result: {arguments.out / 'row.json'}, figure: {arguments.out / 'phase_curves.png'}, bundle: {arguments.out / before_after.BUNDLE}")
    return 0


def add_generate(commands: Any) -> None:
    parser = add_command(commands, "generate", _generate, "continue a prompt with a model, as it is or with a compressor, and count its cache")
    parser.add_argument("--model", required=True, metavar="NAME_OR_PATH", help="a folder, a GGUF file, or a name on the Hugging Face hub")
    parser.add_argument("--revision", help="of the hub's repository")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of weights and activations (default: the bundle's, or float32)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--bundle", type=Path, metavar="DIR", help="a compressor that `mitigate finetune` trained for this model")
    how.add_argument("--variant", metavar="NAME", help="a preset to attach untrained, see `mitigate variants`")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="(default 64)")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's turn of the tokenizer's chat template")
    parser.add_argument("--temperature", type=float, default=0.0, help="draw tokens instead of taking the likeliest (default 0: greedy)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw, and of an untrained variant's gates (default 0)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own)")


def _generate(arguments: argparse.Namespace) -> int:
    _set_threads(arguments.threads)
    variant = config_files.load_variant(arguments.variant) if arguments.variant else None

    import torch

    from mitigate import bases, generate
    from mitigate.export import pretrained
    from mitigate.surgery import attach

    options = {"max_new_tokens": arguments.max_new_tokens, "temperature": arguments.temperature, "seed": arguments.seed}
    generate.check_options(**options)
    described = None if arguments.bundle is None else pretrained.read(arguments.bundle)
    dtype = arguments.dtype or (described["base"]["dtype"] if described else "float32")
    base = bases.load_pretrained(arguments.model, revision=arguments.revision, dtype=dtype)
    torch.manual_seed(arguments.seed)
    if described is not None:
        pretrained.put_on(base, arguments.bundle, described)
    elif variant is not None:
        attach(base.model, variant)
    found = generate.generate(base.model, base.tokenizer, arguments.prompt, chat=arguments.chat, **options)
    print(found.text)
    print(generate.bytes_line(found))
    return 0


def _set_threads(threads: int | None) -> None:
    """ConfigError below one thread; torch's own number where none is given."""
    if threads is not None and threads < 1:
        raise ConfigError(f"--threads must be at least 1, got {threads}")
    if threads:
        import torch

        torch.set_num_threads(threads)
