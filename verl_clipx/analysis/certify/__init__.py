"""Whether the arms of an experiment may be compared: `clipx certify`."""
