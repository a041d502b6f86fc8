"""`megatrain plan` as a user calls it, without a GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import megatrain
from megatrain._native import TileFormat
from megatrain.cli import main
from megatrain.planner import ModelShape
from megatrain.planner.examples import examples
from megatrain.planner.table import HEAD, MACHINES, PRECISIONS, row

pytest.importorskip("pydantic")

QWEN = dict(
    model_type="qwen2",
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
    tie_word_embeddings=False,
)
PAGE = Path(__file__).parents[2] / "docs" / "which-model-fits.md"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen/config.json").write_text(json.dumps(QWEN))
    (tmp_path / "run.yaml").write_text("model: qwen\nbatch: {micro_batch: 16, accumulate: 4}\n")
    return tmp_path


def _plan(*arguments: str) -> int:
    return main(["plan", *arguments])


def test_a_model_key_and_a_configuration_suffice(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _plan("run.yaml", "--gpu", "H200", "--json", "plan.json") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for part in (
        "qwen: 7.62B parameters in 28 blocks",
        "4 x 16 x 1024 = 65,536 tokens",
        "bf16 weights with fp32 masters, fp32 moments; updates after the norm",
        "stay on the device with their optimizer state",
        "tokens/s",
        "bound by computation",
        "next best",
        "with the default placement",
    ):
        assert part in shown.out
    assert max(map(len, shown.out.splitlines())) <= 130
    values = json.loads((here / "plan.json").read_text())
    assert values["model"] == {"name": "qwen", "parameters": 7615616512, "blocks": 28}
    assert values["predicted"]["seconds"] == pytest.approx(5.34, rel=0.02)
    assert sorted(path.name for path in here.iterdir()) == ["plan.json", "qwen", "run.yaml"]


def test_a_directory_alone_and_tokens(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--gpu", "4090", "--gpu-memory", "24GiB", "--host-memory", "128GiB", "--tokens", "8192")
    assert _plan("qwen", *arguments) == 0
    out = capsys.readouterr().out
    assert "= 8,192 tokens" in out
    assert "RTX 4090, 24.0 GiB; host 128 GiB" in out


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("precision.moments=int8", "fp32 masters, int8 moments"),
        ("precision={master: none, moments: bf16}", "bf16 weights without masters, bf16 moments"),
        ("precision.dtype=float32", "fp32 weights, fp32 moments"),
        ("sequence_length=2048", "4 x 16 x 2048"),
    ],
)
def test_the_run_decides_precision_and_batch(
    here: Path, capsys: pytest.CaptureFixture[str], override: str, shown: str
) -> None:
    assert _plan("run.yaml", "--gpu", "H200", "--host-memory", "256GiB", "--set", override) == 0
    assert shown in capsys.readouterr().out


def test_the_runs_own_machine_is_planned_for_unless_another_is_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("--set", "hardware=H200", "--set", "device_memory=80GiB", "--set", "host_memory=120GiB")
    assert _plan("run.yaml", *keys) == 0
    assert "H200, 80.0 GiB; host 120 GiB" in capsys.readouterr().out
    assert _plan("run.yaml", *keys, "--gpu", "H100", "--gpu-memory", "60GiB") == 0
    assert "H100, 60.0 GiB; host 120 GiB" in capsys.readouterr().out


def test_a_lora_run_keeps_its_base_frozen(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two bytes a parameter of the base; updates of the adapter alone."""
    pytest.importorskip("peft")
    with (here / "run.yaml").open("a") as file:
        file.write("lora: {rank: 16, targets: [q_proj, v_proj]}\n")
    assert _plan("run.yaml", "--gpu", "H200", "--json", "plan.json") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "7.62B parameters, 0.00505B of them trained, in 28 blocks" in shown.out
    host = json.loads((here / "plan.json").read_text())["predicted"]["host"]
    assert host["tiles"] == pytest.approx(2 * 7.62e9 + 14 * 5.05e6, rel=2e-3)


def test_a_new_model_has_the_tokenizers_vocabulary(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quickstart = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
    assert _plan(str(quickstart), "--gpu", "H100", "--json", "plan.json") == 0
    values = json.loads((here / "plan.json").read_text())
    assert values["batch"] == {"micro_batches": 1, "rows": 8, "length": 128}
    assert values["model"]["parameters"] > 8192 * 320


def test_what_cannot_fit_is_one_line_with_figures_and_status_2(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _plan("run.yaml", "--gpu", "RTX 4090", "--json", "plan.json") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r"megatrain: .*\n", shown.err)
    assert "qwen needs 99.3 GiB of host memory (14.0 bytes a parameter), but 60.0 GiB of 64.0 GiB" in shown.err
    assert "what would fit: " in shown.err
    assert not (here / "plan.json").exists()


MISTAKES: list[tuple[list[str], str]] = [
    ([], "the following arguments are required: CONFIG"),
    (["absent.yaml", "--gpu", "H200"], "absent.yaml: No such file or directory"),
    (["run.yaml", "--gpu", "TPU"], '"TPU" is no preset; there are presets of H200, H100, A100, RTX 4090, RTX 3090, GH'),
    (["run.yaml", "--set", "hardware=TPU"], '"TPU" is no preset'),
    (["run.yaml", "--gpu", "H200", "--gpu-memory", "much"], '--gpu-memory is "much"; write bytes'),
    (["run.yaml", "--gpu", "H200", "--host-memory", "-1"], "--host-memory is -1; it must be above 0 bytes"),
    (["run.yaml", "--gpu", "H200", "--json", "no/where.json"], "--json no/where.json: no is not a directory"),
    (["run.yaml", "--gpu", "H200", "--json", "."], "--json .: is a directory; name a file"),
    (["run.yaml", "--gpu", "H200", "--tokens", "1000"], "--tokens is 1000; it should be a multiple of"),
    (["run.yaml", "--gpu", "H200", "--set", "batch.rows=1"], "unknown key 'batch.rows'"),
    (["run.yaml", "--gpu", "H200", "--set", "model=absent"], "model absent: no such directory"),
    (["qwen", "--gpu", "H200", "--set", "steps=1"], "--set needs a YAML file"),
    (["run.yaml"], "there is no GPU here to plan for: name one with --gpu"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(m[0]) or "none" for m in MISTAKES])
def test_mistakes_are_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    if message.startswith("there is no GPU") and megatrain._native.cuda_device_count() > 0:
        pytest.skip("there is a GPU")
    assert _plan(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("megatrain: ") and error.count("\n") == 1
    assert message in error


def test_a_planned_placement_is_one_that_a_model_takes() -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from megatrain.planner import PRESETS, Batch, Job, make_plan

    torch.manual_seed(0)
    module = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=False,
        )
    )
    shape = ModelShape.from_module(module)
    plan = make_plan(shape, Job(batch=Batch(micro_batches=2, rows=2, length=8)), PRESETS["H200"])
    assert {unit.name for unit in shape.outside} >= set(plan.placement.outside) > set()
    model = megatrain.StreamedModel(module, placement=plan.placement, device="cpu")
    ids = torch.randint(0, 128, (2, 8))
    losses = [model.step([dict(input_ids=ids, labels=ids)] * 2).loss for _ in range(3)]
    assert losses[2] < losses[0]
    held = model.memory_report()
    assert held.device_resident == plan.memory.device["resident"]
    assert held.device_weights == plan.memory.device.get("slots", 0) + plan.memory.device.get("outside the stacks", 0)
    assert held.host_tiles == plan.memory.host["tiles"]
    model.close()


# the page


def test_examples_have_the_shape_of_their_configurations() -> None:
    from transformers import LlamaConfig, Qwen2Config

    by_name = {shape.name: shape for shape in examples()}
    fields = {key: value for key, value in QWEN.items() if key != "model_type"}
    llama = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
    )
    for name, config in (("Qwen2.5 7B", Qwen2Config(**fields)), ("Llama 3.2 1B", llama)):
        found: Any = ModelShape.from_config(config, name)
        mine: Any = by_name[name]
        assert found.numel == mine.numel
        assert (found.head, found.head_unit, found.head_tied) == (mine.head, mine.head_unit, mine.head_tied)
        for key in ("flops", "last_flops", "attention_width", "inputs", "everything", "products"):
            assert getattr(found.blocks[-1], key) == getattr(mine.blocks[-1], key), key


def test_the_page_is_what_the_planner_says() -> None:
    """All of it would take minutes: its words, its columns, and the rows of two models in one precision."""
    text = PAGE.read_text()
    stale = "docs/which-model-fits.md is stale: megatrain plan --table > docs/which-model-fits.md"
    assert text.startswith(HEAD), stale
    sections = text[len(HEAD) :].split("\n## ")[1:]
    assert len(sections) == len(PRECISIONS), stale
    columns = " | ".join(f"{gpu}, {host} GiB" for gpu, host in MACHINES)
    for section, (_, _, title) in zip(sections, PRECISIONS, strict=True):
        assert section.startswith(f"{title}: "), stale
        assert f"| | {columns} |" in section, stale
        names = re.findall(r"^\| ([^|\s][^|]*) \|", section, re.MULTILINE)
        assert names == [shape.name for shape in examples()], stale
    shapes = {shape.name: shape for shape in examples()}
    for name in ("Llama 3.2 1B", "Qwen2.5 7B"):
        assert row(shapes[name], TileFormat(*PRECISIONS[0][:2])) in sections[0].splitlines(), stale
