"""A short text drawn from the model. There is no cache: the prefix is computed anew for each token."""

import torch

import megatrain

from .config import SampleSettings
from .tokenizer import TextTokenizer


def draw(
    model: megatrain.StreamedModel,
    tokenizer: TextTokenizer,
    settings: SampleSettings,
    *,
    sequence_length: int,
    seed: int,
) -> str:
    """The prompt and what the model adds, up to the end of the document."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    ids = [tokenizer.first(), *tokenizer.encode(settings.prompt)]
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
        if token == tokenizer.end:
            break
        ids.append(token)
    return settings.prompt + tokenizer.decode(ids[given:])


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / temperature, dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
