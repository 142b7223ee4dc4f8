"""From a method to a loss: the one compiled function, its metrics, the contract."""
