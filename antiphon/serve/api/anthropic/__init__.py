"""Anthropic's Messages API over the chat core: `requests` becomes a chat, `events` spells the answer."""
