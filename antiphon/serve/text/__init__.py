"""Between text and token ids: tokenizer, incremental detokenizer, grammars. Neither HTTP nor torch maths. Stop strings
are with the text of an answer (`api/choice`)."""
