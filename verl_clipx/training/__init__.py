"""What acts inside verl's processes: in a step, beside its trainer, in rollouts, without an accelerator."""
