"""The tiny policy's tokenizer: one token per byte, plus numbers, chat markers and answer tags."""

from tokenizers import AddedToken, pre_tokenizers
from transformers import Qwen2Tokenizer

END_OF_TURN = "<|end|>"
PADDING = "<|pad|>"
ROLES = ("system", "user", "assistant")
ANSWER_TAGS = ("<answer>", "</answer>")
# Each of these numbers is one token. A policy of this size learns to copy and to add numbers several times faster than
# digits.
TWO_DIGIT_NUMBERS = tuple(str(number) for number in range(10, 100))

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in " + repr(list(ROLES)) + " %}"
    "{{ raise_exception('unknown role ' + message['role'] + ': use system, user or assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '" + END_OF_TURN + "' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> Qwen2Tokenizer:
    """Build the tokenizer; it is the same every time.

    Whatever was saved, transformers rebuilds the tokenizer of a Qwen2 model as a byte-level BPE from its vocabulary and
    merges. This tokenizer has no merges, so that the loaded one equals the saved one, and any text can be encoded.

    Its tokens are the 256 bytes, 5 special ones, the 2 answer tags and the numbers from 10 to 99. A longer number is
    split from the left: "123" becomes "12", "3". The tags are ordinary tokens, so that decoding with
    `skip_special_tokens=True` keeps them for the reward.
    """
    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(byte_tokens)},
        merges=[],
        unk_token=PADDING,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        extra_special_tokens=[f"<|{role}|>" for role in ROLES],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in ANSWER_TAGS + TWO_DIGIT_NUMBERS]
    )
    return tokenizer
