"""What `clipx check-loss` holds a method to."""
