"""Values that only running the script would tell, and an argument that does not exist."""

import os

from trl import GRPOConfig

epochs = int(os.environ["EPOCHS"])
args = GRPOConfig(
    output_dir=f"runs/{'un'}read",
    learning_rate=float(os.environ["LR"]),
    num_train_epochs=epochs,
    top_p=0.95,
    num_generation=16,
    save_strategy="no",
    hub_model_id=os.environ["HUB"],
)
