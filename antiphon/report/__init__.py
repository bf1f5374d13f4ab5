"""What a plan looks like to people: on a terminal, as one self-contained page, as other engines' settings."""
