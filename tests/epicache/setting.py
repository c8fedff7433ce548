"""What the tests of a conversation share, also with the process that is killed."""
from pykvq.epicache.memory import Settings

OPTIONS = {"budget": 400, "block": 200, "room": 400, "settings": Settings(prompt=250), "encoder_name": "model", "threads": 2}
EPISODE = Settings(prompt=250, recall="episode")
TOPICS = ["The dog likes the beach.", "Oak makes good tables.", "Lisbon is warm in May."]
