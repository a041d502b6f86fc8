"""The command line as a user drives it, in a temporary directory."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain
from megatrain.cli import main

pytest.importorskip("pydantic")
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.data import in_order
from megatrain.train.config_file import load_settings
from megatrain.train.model import stream
from megatrain.train.prepare import prepare

CONFIG = """
model: {type: qwen3, hidden_size: 32, num_hidden_layers: 2, intermediate_size: 48, num_attention_heads: 2,
  num_key_value_heads: 1, head_dim: 16, tie_word_embeddings: true}
data: {path: text.txt, held_out: 0.2}
tokenizer: {type: bytes}
sequence_length: 32
batch: {micro_batch: 4, accumulate: 2}
steps: 6
optimizer: {lr: 1e-2}
schedule: {warmup_steps: 2, min_lr: 1e-3}
device: cpu
sample: {prompt: "the ", tokens: 8}
output: {directory: runs/tiny, log_every: 2}
"""
TEXT = "".join(f"{i} green bottles hanging on the wall\n" for i in range(99, 0, -1))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def _train(*overrides: str) -> int:
    return main(["train", "run.yaml", *(part for override in overrides for part in ("--set", override))])


def _metrics(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def _losses(run: str) -> list[float]:
    return [record["loss"] for record in _metrics(run) if "loss" in record]


def _refused(capsys: pytest.CaptureFixture[str], here: Path, status: int, message: str) -> None:
    """One line on stderr that says `message`, status 2, and no file that was not there before."""
    error = capsys.readouterr().err
    assert status == 2
    assert message in error
    assert error.startswith("megatrain: ")
    assert error.count("\n") == 1
    assert not (here / "runs").exists()


def test_train_leaves_a_model_that_transformers_loads(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train() == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for part in ("step 1/6", "step 6/6", "tokens/s", "waiting for copies", "lr ", "norm ", "sample:\nthe "):
        assert part in shown.out
    steps = [record for record in _metrics("runs/tiny") if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert [record["lr"] for record in steps] == pytest.approx(
        [5e-3, 1e-2, *(1e-3 + 9e-3 * 0.5 * (1 + math.cos(math.pi * i / 4)) for i in (0, 1, 2, 3))], rel=1e-12
    )
    losses = _losses("runs/tiny")
    assert losses[0] == pytest.approx(math.log(257), abs=0.3)
    assert losses[-1] < losses[0]
    measured = next(record for record in _metrics("runs/tiny") if "eval_loss" in record)
    assert f"{measured['bits_per_byte']:.3f} bits per byte" in shown.out

    # What was saved scores the held-out text as the streamed model did.
    model = AutoModelForCausalLM.from_pretrained("runs/tiny/model").eval()
    assert model.dtype == torch.float32
    held_out = prepare(load_settings("run.yaml")).held_out
    assert held_out is not None
    nats = 0.0
    with torch.no_grad():
        for batch in in_order(held_out.rows, 4):
            logits = model(
                input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
            ).logits[:, :-1]
            nats += float(
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
                )
            )
    assert measured["bits_per_byte"] == pytest.approx(nats / math.log(2) / held_out.nbytes, rel=1e-5)
    assert held_out.nbytes == len(TEXT) - len("".join(next(prepare(load_settings("run.yaml")).corpus.texts(1))))
    tokenizer = AutoTokenizer.from_pretrained("runs/tiny/model")
    assert tokenizer.decode(tokenizer("green").input_ids) == "green"


@pytest.mark.gpu
def test_a_gpu_trains_in_bfloat16(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if megatrain._native.cuda_device_count() == 0:
        pytest.skip(f"no GPU: {megatrain._native.cuda_unavailable_reason()}")
    assert _train("device=cuda") == 0
    assert "bfloat16" in capsys.readouterr().out
    losses = _losses("runs/tiny")
    assert losses[-1] < losses[0]
    assert AutoModelForCausalLM.from_pretrained("runs/tiny/model").dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_logits_equal_streamed_ones(here: Path, dtype: str) -> None:
    settings = load_settings("run.yaml", [f"precision.dtype={dtype}", "steps=3"])
    prepared = prepare(settings)
    model = stream(prepared.source, settings)
    for _ in range(3):
        model.step(next(prepared.loader))
    batch = next(prepared.loader)[0]
    model.eval()
    with torch.no_grad():
        streamed = model(input_ids=batch["input_ids"]).logits
    model.save_pretrained("saved")
    loaded = AutoModelForCausalLM.from_pretrained("saved", dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        resident = loaded(input_ids=batch["input_ids"]).logits
    torch.testing.assert_close(streamed, resident, rtol=0, atol=0)


def test_equal_seeds_give_equal_runs(here: Path) -> None:
    assert [_train("steps=3"), _train("steps=3"), _train("steps=3", "seed=1")] == [0, 0, 0]
    assert _losses("runs/tiny") == _losses("runs/tiny-2")
    assert _losses("runs/tiny") != _losses("runs/tiny-3")


def test_a_model_directory_is_trained_on(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train("steps=40", "tokenizer={type: bpe, vocab_size: 300}") == 0
    lines = [json.dumps({"text": f"{i} green bottles"}) for i in range(200)]
    (here / "chats.jsonl").write_text("\n".join(lines))
    (here / "tune.yaml").write_text(
        "model: runs/tiny/model\ndata: chats.jsonl\nsequence_length: 16\nsteps: 2\nbatch: {micro_batch: 4}\n"
        "device: cpu\noutput: {directory: runs/tuned}\n"
    )
    capsys.readouterr()
    assert main(["train", "tune.yaml"]) == 0
    assert capsys.readouterr().err == ""
    # The first loss is that of the directory's weights on the first rows.
    prepared = prepare(load_settings("tune.yaml"))
    resident = AutoModelForCausalLM.from_pretrained("runs/tiny/model")
    with torch.no_grad():
        expected = float(resident(**next(prepared.loader)[0], use_cache=False).loss)
    assert _losses("runs/tuned")[0] == pytest.approx(expected, rel=1e-6)
    assert (
        AutoTokenizer.from_pretrained("runs/tuned/model").get_vocab()
        == prepared.tokenizer.tokenizer.get_vocab()
    )


def test_the_quickstart_takes_a_model_directory(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train("steps=1") == 0
    capsys.readouterr()
    quickstart = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
    overrides = [
        "model=runs/tiny/model",
        "data=text.txt",
        "steps=1",
        "sequence_length=32",
        "device=cpu",
        "sample.tokens=2",
        "eval.beat_bigram=false",
    ]
    status = main(
        ["train", str(quickstart), *(part for override in overrides for part in ("--set", override))]
    )
    shown = capsys.readouterr()
    assert "the key 'tokenizer' is not used; runs/tiny/model has its own" in shown.err
    assert "saved runs/quickstart/model" in shown.out
    assert status == 0


def test_a_model_behind_the_bigram_is_status_1(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train("steps=1", "eval.beat_bigram=true", "sample.tokens=0") == 1
    shown = capsys.readouterr()
    assert re.search(r"^megatrain: \S+ bits per byte does not beat the byte bigram model's \S+\n$", shown.err)
    assert "sample" not in shown.out
    assert (here / "runs/tiny/model/config.json").is_file()


MISTAKES = [
    (["batch.microbatch=1"], "unknown key 'batch.microbatch' (did you mean 'micro_batch'?)"),
    (["steps=-1"], "steps should be greater than or equal to 1"),
    (
        ["model.hidden_sise=3"],
        "unknown key 'model.hidden_sise' of model type qwen3 (did you mean 'hidden_size'?)",
    ),
    (["model.type=qwen33"], "unknown model type 'qwen33' (did you mean 'qwen3"),
    (["model.type=vit"], "unknown model type 'vit'"),
    (["model.hidden_size=wide"], "model: "),
    (["model.vocab_size=100"], "vocab_size is 100, but the tokenizer has 257 tokens"),
    (["model.max_position_embeddings=16"], "sequence_length is 32, but the model has 16 positions"),
    (["model.num_hidden_layers=1"], "model: "),
    (["model=absent"], "model absent: no such directory"),
    (["model=empty"], "model empty: holds no config.json"),
    (["model=strange"], "unknown model type 'martian'"),
    (["model=typeless"], "names no model_type"),
    (["model=broken"], "config.json: "),
    (["model=weightless"], "model weightless: holds no .safetensors and no pytorch_model.bin weights"),
    (["data=absent.txt"], "data.path absent.txt: no such file"),
    (["data=empty.txt"], "data.path empty.txt: holds no text"),
    (["data=one.txt"], "too short to hold out a part of it"),
    (["data=odd.jsonl"], "odd.jsonl:1: no known shape has the keys Text"),
    (["data=two.jsonl"], "it may be messages or text; say which in data.format"),
    (["data=chats.jsonl", "data.held_out=0"], "the tokenizer has no chat template"),
    (["data.chat_template=absent.jinja"], "data.chat_template absent.jinja: No such file"),
    (["data={path: chats.jsonl, validation: text.txt}"], "text.txt"),
    (["data=chats.jsonl", "eval.beat_bigram=true"], "eval.beat_bigram is for texts"),
    (["report_to=wandb"], 'report_to: wandb is not installed; run: pip install "megatrain[wandb]"'),
    (["data=latin.txt"], "latin.txt:1: not UTF-8 text"),
    (["data=bad.jsonl"], "bad.jsonl:2: not JSON"),
    (["output.directory=text.txt/run"], "text.txt is not a directory"),
    (["device=cuda:99"], 'device is "cuda:99"'),
]


@pytest.mark.parametrize(("overrides", "message"), MISTAKES, ids=[m[0][0] for m in MISTAKES])
def test_mistakes(here: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str) -> None:
    if "cuda" in message and megatrain._native.cuda_device_count() > 0:
        pytest.skip("there is a GPU")
    (here / "empty").mkdir()
    for name, config in {
        "strange": '{"model_type": "martian"}',
        "typeless": "{}",
        "broken": "{",
        "weightless": '{"model_type": "qwen3"}',
    }.items():
        (here / name).mkdir()
        (here / name / "config.json").write_text(config)
        if name != "weightless":
            (here / name / "model.safetensors").write_bytes(b"")
    (here / "empty.txt").write_text("")
    (here / "one.txt").write_text("x")
    (here / "odd.jsonl").write_text('{"Text": "a"}\n')
    (here / "two.jsonl").write_text('{"text": "a", "messages": []}\n')
    (here / "chats.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n' * 2)
    (here / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (here / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    _refused(capsys, here, _train(*overrides), message)


def test_broken_weights_are_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train("steps=1", "output.directory=made") == 0
    weights = here / "made/model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    capsys.readouterr()
    (here / "run.yaml").write_text(CONFIG.replace("tokenizer: {type: bytes}\n", ""))
    _refused(capsys, here, _train("model=made/model"), "model made/model: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "the following arguments are required: CONFIG"),
        (["train", "absent.yaml"], "absent.yaml: No such file or directory"),
        (["train", "run.yaml", "--sat", "a=b"], "unrecognized arguments: --sat a=b"),
    ],
)
def test_wrong_arguments(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    _refused(capsys, here, main(arguments), message)


def test_version_help_and_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"megatrain {megatrain.__version__}\n"
    assert main(["--help"]) == 0
    assert re.search(r"train +train or fine-tune", capsys.readouterr().out)
    assert main(["train", "--help"]) == 0
    assert "--set KEY=VALUE" in capsys.readouterr().out
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    for name in (
        "CPU",
        "update kernel",
        "usable cores",
        "memory limit",
        "locked memory",
        "huge pages",
        "NVIDIA driver",
        "GPU",
        "torch",
    ):
        assert re.search(rf"^{name}", shown, re.MULTILINE)
    assert megatrain._native.cpu_model() in shown


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (("16.0 GT/s PCIe", "8", "32.0 GT/s PCIe", "16", "1"), "PCIe gen 4 x8 (at most gen 5 x16), NUMA node 1"),
        (("32.0 GT/s PCIe", "16", "32.0 GT/s PCIe", "16", "-1"), "PCIe gen 5 x16"),
        (("128.0 GT/s PCIe", "16", None, None, None), "PCIe 128.0 GT/s x16"),
        (("Unknown", "63", None, None, "0"), "link not told by the kernel"),
        ((None, None, None, None, None), "link not told by the kernel"),
    ],
)
def test_the_link_of_a_gpu(files: tuple[str | None, ...], expected: str, tmp_path: Path) -> None:
    from megatrain.cli.pci import link

    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width", "numa_node")
    for name, text in zip(names, files, strict=True):
        if text is not None:
            (folder / name).write_text(text + "\n")
    assert link("0000:3b:00.0", tmp_path) == expected


def test_warnings_are_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import warnings

    import megatrain.train.run as module

    monkeypatch.setattr(module, "run", lambda settings: warnings.warn("two\nlines", stacklevel=1))
    assert _train() == 0
    assert capsys.readouterr().err == "megatrain: two lines\n"


def _python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


def test_a_missing_extra_is_one_line(here: Path) -> None:
    code = (
        "import sys; sys.modules['rich'] = sys.modules['pydantic'] = None\n"
        "from megatrain.cli import main; assert main(['info']) == 0; sys.exit(main(['train', 'run.yaml']))"
    )
    done = _python(code)
    assert (done.returncode, done.stderr) == (
        2,
        'megatrain: pydantic, rich not installed; run: pip install "megatrain[train]"\n',
    )
    assert not (here / "runs").exists()


def test_interrupted_runs_keep_whole_metrics_only(here: Path) -> None:
    command = [sys.executable, "-m", "megatrain.cli", "train", "run.yaml", "--set", "steps=1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.startswith("step 4/"):
                break
        os.kill(process.pid, signal.SIGINT)
        process.stdout.read()
        error = process.stderr.read()
    assert process.returncode == 130
    assert re.fullmatch(
        r"megatrain: interrupted after step \d+ of 1000000; "
        r"runs/tiny/checkpoint-\d+ is saved, --set resume=auto goes on from it\n",
        error,
    )
    last = int(re.search(r"after step (\d+)", error)[1])  # type: ignore[index]
    left = {path.name for path in (here / "runs/tiny").iterdir()}
    records = {"achieved.json", "config.yaml", "metrics.jsonl", "plan.json", "trace.json"}
    assert left == {f"checkpoint-{last}", "tokenizer", *records}
    steps = [record["step"] for record in _metrics("runs/tiny") if "loss" in record]
    # Every step that was finished is there, and no other one.
    assert steps == list(range(1, last + 1))


def test_a_closed_pipe_is_quiet(here: Path) -> None:
    command = f"{sys.executable} -m megatrain.cli info | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("megatrain")
