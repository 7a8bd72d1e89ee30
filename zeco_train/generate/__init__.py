"""Generation: prefill with the chunked operator, then decoding with one recurrent step per token.

`[torchrun …] python -m zeco_train.generate RUN --prompt … [KEY=VALUE …]`. The modules are `prefill` (prompts to states,
on any number of ranks, in pieces of bounded size), `decode` (one token per step, constant memory), `sampling` (logits
to tokens), `text` (streaming detokenisation) and `generator`, which combines them.
"""
