"""Mathematics with a boxed final answer: the papers' data sets, rewards on math-verify, equality of answers."""
