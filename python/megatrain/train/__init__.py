"""The trainer behind `megatrain train`: a text, a tokenizer, fixed-length rows, the step loop.

Read in the order of the data: config, text, tokenizer, data, model, loop, evaluate, sample, run.
Needs the extra "train"; nothing else of the package imports it."""
