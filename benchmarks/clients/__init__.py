"""Stock clients against our server: `process` runs a command, `runs` has what each client does, `check` the rest."""
