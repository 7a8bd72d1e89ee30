"""Generation: a prompt goes through the chunked operator, and what follows it through one recurrent step a token.

`[torchrun …] python -m zeco_train.generate RUN --prompt … [KEY=VALUE …]`. The parts are `prefill` (a prompt, over any
number of ranks and in pieces of bounded size, to states), `decode` (one token a step, with constant memory), `sampling`
(logits to tokens), `text` (tokens to text as it comes) and `generator`, which puts them together.
"""
