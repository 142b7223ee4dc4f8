"""The losses in trainers other than verl's: as a function of tensors, and a comparison of gradients."""
