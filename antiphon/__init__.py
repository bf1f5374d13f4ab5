"""Antiphon plans, trains and serves Mixture-of-Experts language models with attention and experts apart."""

__version__ = "0.1.0"
