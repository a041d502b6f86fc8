"""The schema, the YAML file and --set."""

from pathlib import Path

import pytest

pytest.importorskip("pydantic")
from megatrain.train.config import ShapeSettings, TrainSettings
from megatrain.train.config_file import load_settings
from megatrain.train.errors import UserError
from megatrain.train.reference import reference

MINIMAL = "model: {type: qwen3, hidden_size: 32}\ndata: notes.txt\nsteps: 4\n"
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return str(path)


def test_defaults_and_short_forms(tmp_path: Path) -> None:
    settings = load_settings(_file(tmp_path, MINIMAL))
    assert isinstance(settings.model, ShapeSettings)
    assert settings.model.fields() == {"hidden_size": 32}
    assert settings.data.path == ["notes.txt"]
    assert (settings.batch.micro_batch, settings.slots, settings.precision.dtype) == (8, 2, "auto")
    with pytest.raises(ValueError, match="frozen"):
        settings.steps = 5  # type: ignore[misc]


def test_overrides_replace_keys_at_any_depth(tmp_path: Path) -> None:
    settings = load_settings(
        _file(tmp_path, MINIMAL),
        ["optimizer.lr=1e-4", "data.max_bytes=100", "model=some/dir", "output.directory=runs/x=y", "steps=9"],
    )
    assert settings.optimizer.lr == 1e-4
    assert (settings.data.path, settings.data.max_bytes) == (["notes.txt"], 100)
    assert settings.model == "some/dir"
    assert settings.output.directory == "runs/x=y"
    assert settings.steps == 9


def test_a_path_for_data_keeps_what_else_is_said_of_them(tmp_path: Path) -> None:
    file = _file(tmp_path, MINIMAL.replace("notes.txt", "{path: notes.txt, held_out: 0.2}"))
    for value, expected in (("a.txt", ["a.txt"]), ("[a.txt, b.txt]", ["a.txt", "b.txt"])):
        data = load_settings(file, [f"data={value}"]).data
        assert (data.path, data.held_out) == (expected, 0.2)
    assert load_settings(file, ["data={path: a.txt}"]).data.held_out != 0.2


def test_exponents_without_a_dot_are_numbers(tmp_path: Path) -> None:
    text = MINIMAL.replace("hidden_size: 32", "rms_norm_eps: 1e-5")
    model = load_settings(_file(tmp_path, text)).model
    assert isinstance(model, ShapeSettings)
    assert model.fields() == {"rms_norm_eps": 1e-5}


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (MINIMAL + "optimiser: {lr: 1}\n", [], "unknown key 'optimiser' (did you mean 'optimizer'?)"),
        (MINIMAL + "optimizer: {learn: 1}\n", [], "unknown key 'optimizer.learn'"),
        (
            MINIMAL,
            ["schedule.warmup_step=3"],
            "unknown key 'schedule.warmup_step' (did you mean 'warmup_steps'?)",
        ),
        (MINIMAL.replace("steps: 4", ""), [], "one of the keys 'steps' and 'epochs' is missing"),
        (MINIMAL, ["epochs=2"], "steps and epochs are both given"),
        (MINIMAL, ["steps=null", "epochs=0"], "epochs should be greater than 0, got 0"),
        (MINIMAL, ["schedule.warmup_steps=2", "schedule.warmup_share=0.1"], "are both given; one of them is enough"),
        (MINIMAL, ["schedule.kind=cosin"], "should be 'cosine', 'constant', 'linear' or 'wsd', got 'cosin'"),
        (MINIMAL, ["data.held_out=0", "eval.every=5"], "eval.every is 5, but data.held_out is 0"),
        (MINIMAL, ["data.held_out=0", "eval.at_start=true"], "eval.at_start is True, but data.held_out is 0"),
        (MINIMAL, ["eval.patience=2"], "eval.patience is 2, but eval.every is not set"),
        (MINIMAL, ["data.format=chat"], "data.format should be 'auto', 'text', 'prompt_completion'"),
        (MINIMAL, ["data.paths=a"], "unknown key 'data.paths' (did you mean 'path'?)"),
        (MINIMAL, ["lora.rnk=4"], "unknown key 'lora.rnk' (did you mean 'rank'?)"),
        (MINIMAL, ["data.path=[]"], "data.path should have at least 1 item"),
        (MINIMAL, ["report_to=mlflow"], "report_to.0 should be 'tensorboard' or 'wandb', got 'mlflow'"),
        (MINIMAL.replace("type: qwen3, ", ""), [], "the key 'model.type' is missing"),
        (MINIMAL, ["model=7"], "model should be a valid string, got 7"),
        (MINIMAL, ["steps=ten"], "steps should be a valid integer"),
        (MINIMAL, ["steps=0"], "steps should be greater than or equal to 1, got 0"),
        (MINIMAL, ["optimizer.lr=.nan"], "optimizer.lr should be"),
        (MINIMAL, ["optimizer.betas=[0.9, 1.0]"], "optimizer.betas.1 should be less than 1, got 1.0"),
        (MINIMAL, ["device=gpu"], "device "),
        (MINIMAL, ["schedule.min_lr=1"], "schedule.min_lr (1) is above optimizer.lr (1e-05)"),
        (MINIMAL, ["eval.context=1024"], "eval.context (1024) should be below sequence_length (1024)"),
        (MINIMAL, ["steps"], "--set steps: should read key=value or key.sub=value"),
        (MINIMAL, ["a..b=1"], "--set a..b=1: should read"),
        (MINIMAL, ["steps.x=1"], "'steps' is 4, which has no keys"),
        (MINIMAL + "steps: 5\n", [], "run.yaml:4: the key 'steps' stands twice"),
        (MINIMAL + "3: 5\n", [], "run.yaml:4: the key 3 is not a string"),
        ("model: [1\n", [], "run.yaml:2: "),
        ("- a\n", [], "should hold `key: value` lines"),
        ("", [], "should hold `key: value` lines"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, text: str, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as raised:
        load_settings(_file(tmp_path, text), overrides)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_all_mistakes_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"slots should be .*; unknown key 'sede'"):
        load_settings(_file(tmp_path, MINIMAL + "slots: 1\nsede: 1\n"))


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        load_settings(str(tmp_path / "absent.yaml"))
    with pytest.raises(UserError, match="directory"):
        load_settings(str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes(b"data: caf\xe9\n")
    with pytest.raises(UserError, match="not UTF-8 at byte 9"):
        load_settings(str(tmp_path / "latin.yaml"))


def test_one_thing_stands_for_a_list_of_one(tmp_path: Path) -> None:
    overrides = ["data=[a.txt, b.txt]", "data.validation=c.txt", "sample.prompt=Once", "report_to=wandb"]
    settings = load_settings(_file(tmp_path, MINIMAL), overrides)
    assert settings.data.path == ["a.txt", "b.txt"]
    assert settings.data.validation == ["c.txt"]
    assert settings.sample.prompt == ["Once"]
    assert settings.report_to == ["wandb"]


def test_the_reference_is_that_of_the_schema() -> None:
    """Else: python -m megatrain.train.reference > docs/configuration.md"""
    page = (QUICKSTART.parents[1] / "docs" / "configuration.md").read_text()
    assert page == reference()


def test_the_reference_has_every_key() -> None:
    for model in (TrainSettings, *(f.annotation for f in TrainSettings.model_fields.values())):
        for name, field in getattr(model, "model_fields", {}).items():
            assert f"| `{name}` |" in reference()
            assert field.description.replace("|", "\\|") in reference()


def test_the_quickstart_is_valid_and_survives_a_round_trip() -> None:
    settings = load_settings(str(QUICKSTART))
    assert TrainSettings.model_validate(settings.model_dump(mode="json")) == settings


def test_every_key_is_described() -> None:
    def undescribed(model: type, prefix: str = "") -> list[str]:
        found = []
        for name, field in model.model_fields.items():  # type: ignore[attr-defined]
            if not field.description:
                found.append(prefix + name)
            if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
                found += undescribed(field.annotation, f"{prefix}{name}.")
        return found

    assert undescribed(TrainSettings) + undescribed(ShapeSettings, "model.") == []
