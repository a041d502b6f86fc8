"""A short run on the GPU for compute-sanitizer:

compute-sanitizer --tool memcheck --error-exitcode 1 python tests/python/short_run.py"""

from __future__ import annotations

import families
import torch

import megatrain


def main() -> None:
    module = families.build(families.FAMILIES[2], dropout=True)
    model = megatrain.StreamedModel(module, device="cuda", compile=False, max_grad_norm=1.0)
    for step in range(3):
        report = model.step([families.text_batch(step), families.text_batch(step + 9, rows=3)])
        print(f"step {step}: loss {report.loss:.4f}, norm {report.grad_norm:.4f}")
    for seed in (1, 2):  # the second backward adds to the first through an accumulator section
        model(**families.text_batch(seed)).loss.backward()
    model.optimizer.step()
    with torch.no_grad():
        model(input_ids=families.text_batch(1)["input_ids"])
    print(f"evaluation: loss {model.evaluate(families.text_batch(1)).loss:.4f}")
    model.close()


if __name__ == "__main__":
    main()
