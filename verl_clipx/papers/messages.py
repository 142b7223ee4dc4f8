"""Prompts as verl's data sets hold them: chat messages."""

from typing import Any


def fault_of_prompt(prompt: Any) -> str | None:
    """Says why a prompt is no list of chat messages with a text each, as verl's data set takes; None if it is."""
    if not isinstance(prompt, list):
        return f"prompt is {prompt!r:.60}, not a list of chat messages"
    if not prompt:
        return "prompt is an empty list, without a chat message"
    for message in prompt:
        if not isinstance(message, dict):
            return f"prompt holds {message!r:.60}, not a chat message of role and content"
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                return f"prompt has a message whose {key} is {message.get(key)!r:.60}, not text"
    return None
