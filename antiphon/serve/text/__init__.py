"""Between text and token ids: tokenizer, incremental detokenizer, stop strings, grammars. Neither HTTP nor torch
maths."""
