"""Parts that every room may use: durable files, commands, the terminal, sums over ranks, sections."""
