"""Any published MoE `config.json` as sizes to plan with: a generic reader of the usual keys, and a table of quirks."""
