"""Short texts drawn from the model. There is no cache: the prefix is computed anew for each token."""

import sys
from typing import Any

import torch

import megatrain
from megatrain.data import TextTokenizer

from .config import SampleSettings
from .hooks import Hook, Run


class Samples(Hook):
    """Every so many steps, and at the end."""

    def __init__(self) -> None:
        self._drawn_at = 0

    def after_step(self, run: Run) -> None:
        every = run.settings.sample.every
        if every is not None and run.step % every == 0:
            self._draw(run)

    def ended(self, run: Run) -> None:
        if self._drawn_at != run.step:
            self._draw(run)

    def _draw(self, run: Run) -> None:
        settings = run.settings.sample
        if settings.tokens == 0:
            return
        chat = run.prepared.corpus.shape in ("messages", "sharegpt", "alpaca") and bool(
            run.prepared.tokenizer.tokenizer.chat_template
        )
        for prompt in settings.prompt:
            text = draw(
                run.model,
                run.prepared.tokenizer,
                settings,
                prompt,
                sequence_length=run.settings.sequence_length,
                seed=run.settings.seed,
                chat=chat,
            )
            run.log({"step": run.step, "sample": text})
            encoding = sys.stdout.encoding or "utf-8"
            run.progress.note(f"sample:\n{text.encode(encoding, 'replace').decode(encoding)}\n")
        self._drawn_at = run.step
        run.model.train()


def draw(
    model: megatrain.StreamedModel,
    tokenizer: TextTokenizer,
    settings: SampleSettings,
    prompt: str,
    *,
    sequence_length: int,
    seed: int,
    chat: bool = False,
) -> str:
    """The prompt and what the model adds, up to the end of the document; or, of a chat, the answer to it."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    ends = {tokenizer.end}
    if chat:
        ids, ends = _as_chat(model, tokenizer, prompt, ends)
    else:
        ids = [tokenizer.first(), *tokenizer.encode(prompt)]
    given = len(ids)
    # Rows of one length, filled up behind: causal attention does not see the filling, and a compiled
    # block keeps its shape.
    length = min(sequence_length, given + settings.tokens)
    while len(ids) < given + settings.tokens:
        window = ids[-length:]
        filled = window + [tokenizer.end] * (length - len(window))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([filled])).logits[0, len(window) - 1]
        token = _choose(logits[: tokenizer.size].float().cpu(), settings.temperature, generator)
        if token in ends:
            break
        ids.append(token)
    said = tokenizer.decode(ids[given:])
    return f"{prompt}\n> {said}" if chat else prompt + said


def _as_chat(
    model: megatrain.StreamedModel, tokenizer: TextTokenizer, prompt: str, ends: set[int]
) -> tuple[list[int], set[int]]:
    """The user's message with a generation prompt; the ends of the model's generation configuration count, too."""
    text = tokenizer.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    ids: list[int] = tokenizer.tokenizer(text, add_special_tokens=False).input_ids
    configuration: Any = getattr(model.module, "generation_config", None)
    more = getattr(configuration, "eos_token_id", None)
    more = more if isinstance(more, list) else [more]
    return ids, ends | {token for token in more if token is not None}


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / temperature, dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
