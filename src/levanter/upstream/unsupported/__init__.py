"""What upstream has and this project does not: names, entry points, configurations. Each refusal names what to use."""
