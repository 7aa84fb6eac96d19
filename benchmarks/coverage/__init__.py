"""What a step may be made of: torch's optimizers, timm's, torch's operators and modules, each trained beside eager."""
