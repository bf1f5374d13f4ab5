"""Anthropic's Messages API over the chat core: `requests` becomes a chat, `messages` spells the answer."""
