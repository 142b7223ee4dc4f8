"""Checks prompts, which are lists of chat messages in verl's data sets."""

from typing import Any


def fault_of_prompt(prompt: Any) -> str | None:
    """Return why verl's data set would not take a prompt; None if it would.

    It takes a list of at least one chat message. Each message is a dictionary whose role and content are texts.
    """
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
