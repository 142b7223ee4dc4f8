"""What a step does: the training worker, the plan of an update, the extra pass, the policy loss."""
