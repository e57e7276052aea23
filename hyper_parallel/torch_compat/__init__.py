"""Semi-private torch names, each in one place: the only modules that touch ``torch._*`` names."""
