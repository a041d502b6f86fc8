"""Round trips, boundaries and the token stream."""

from pathlib import Path

import pytest

pytest.importorskip("pydantic")
from tokenizers.processors import TemplateProcessing

from megatrain.data import Encoder, TextTokenizer
from megatrain.data.shapes import TextExample
from megatrain.train.config import TokenizerSettings
from megatrain.train.errors import UserError
from megatrain.train.tokenizer import BOUNDARY, load_tokenizer, train_tokenizer

CORPUS = [f"def function_{i}(value):\n    return value + {i}\n" * 20 for i in range(10)]
ODD = "\t naïve 🙂\r\n\x00\n  '''\u2028 ﬁ ̈" + BOUNDARY + "  x = 1  \n"


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> TextTokenizer:
    return train_tokenizer(TokenizerSettings(type=request.param, vocab_size=300), CORPUS)


def test_every_text_comes_back(tokenizer: TextTokenizer) -> None:
    for text in ("", " ", ODD, CORPUS[3], "".join(map(chr, range(0x300)))):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_boundary_written_out_is_text(tokenizer: TextTokenizer) -> None:
    assert tokenizer.end not in tokenizer.encode(ODD)
    assert tokenizer.decode([tokenizer.end]) == BOUNDARY


def test_bytes_are_bytes() -> None:
    tokenizer = train_tokenizer(TokenizerSettings(type="bytes"), CORPUS)
    assert tokenizer.size == 257
    assert len(tokenizer.encode(ODD)) == len(ODD.encode())


def test_bpe_is_shorter_and_the_same_each_time() -> None:
    first, second = (train_tokenizer(TokenizerSettings(vocab_size=300), CORPUS) for _ in range(2))
    assert first.size <= 300
    assert len(first.encode(CORPUS[0])) < 0.6 * len(CORPUS[0])
    assert first.tokenizer.get_vocab() == second.tokenizer.get_vocab()
    assert first.encode(ODD) == second.encode(ODD)


def test_a_saved_tokenizer_is_the_same(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    tokenizer.tokenizer.save_pretrained(str(tmp_path))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.size, loaded.begin, loaded.end) == (tokenizer.size, None, tokenizer.end)
    for text in (ODD, CORPUS[3]):
        assert loaded.encode(text) == tokenizer.encode(text)
        assert loaded.decode(loaded.encode(text)) == text


def test_boundaries_stand_around_a_document() -> None:
    tokenizer = train_tokenizer(TokenizerSettings(type="bytes"), CORPUS)
    a, b = tokenizer.encode("ab")
    end = tokenizer.end
    found = Encoder(tokenizer, "text").encode(TextExample("ab"))
    assert found.ids.tolist() == [end, a, b, end]
    assert found.targets.tolist() == [False, True, True, True]


def test_a_begin_token_is_never_predicted() -> None:
    plain = train_tokenizer(TokenizerSettings(type="bytes"), CORPUS)
    a, b = plain.encode("ab")
    begin, end = 7, plain.end
    found = Encoder(TextTokenizer(plain.tokenizer, begin=begin, end=end), "text").encode(TextExample("ab"))
    assert found.ids.tolist() == [begin, a, b, end]
    assert found.targets.tolist() == [False, True, True, True]


def test_a_tokenizer_that_adds_a_begin_token(tmp_path: Path) -> None:
    made = train_tokenizer(TokenizerSettings(type="bytes"), CORPUS)
    made.tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = made.tokenizer.bos_token_id
    made.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    made.tokenizer.save_pretrained(str(tmp_path))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.begin, loaded.end, loaded.first()) == (begin, made.end, begin)
    assert loaded.encode("ab") == made.encode("ab")


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UserError, match=r"holds no tokenizer \(none of tokenizer.json") as raised:
        load_tokenizer(tmp_path)
    assert "\n" not in str(raised.value)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="no tokenizer could be loaded") as raised:
        load_tokenizer(tmp_path)
    assert "\n" not in str(raised.value)
