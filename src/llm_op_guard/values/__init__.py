"""Class B: rules that read the values of tensors."""
