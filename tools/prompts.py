"""The requests of the demo: three contexts, four questions about each.

The texts were written for this project. A context is 300 to 450 tokens of SmolLM2, so every
question after the first finds 23 to 25 whole blocks of 16 tokens in the pool. Of every
greedy continuation of CONTINUATION_TOKENS tokens the margin between the best two logits
stays above MARGIN_MIN, with and without reuse: rounding cannot change a token.
"""

CONTINUATION_TOKENS = 16
MARGIN_MIN = 1e-3

_LIGHTHOUSE = """\
The lighthouse at Carrow Point stands on a narrow shelf of black rock, two miles from the \
village of Hallin. It was built in 1874 by an engineer named Edith Marlow, who had to bring \
every stone across the bay by boat because no road reached the point. The tower is thirty-one \
metres high and has one hundred and forty-four steps. At the top is a lamp that first burned \
whale oil, later paraffin, and since 1953 has been lit by electricity. The beam turns once \
every twelve seconds, and on a clear night it can be seen from a distance of twenty miles.

For almost a century a keeper lived in the tower with his family. The last keeper was Tomas \
Brandt, who stayed for twenty-six years. He kept three goats, a vegetable garden in a walled \
yard behind the tower, and a diary in which he wrote down the weather each morning before \
breakfast. His daughter Anna learned to read from the labels of the supply crates, and when \
she grew up she became a teacher in Hallin. In the winter of 1968 a storm broke the windows of \
the lamp room. Brandt climbed the stairs eleven times that night to hang wet blankets over the \
frames, so that the flame of the spare lamp would not go out. Two fishing boats found their \
way home by it, and the crew of one of them, the Heron, brought him a barrel of herring every \
autumn until he retired.

Today the lamp is controlled by a computer in the harbour office, and the keeper's rooms are a \
small museum. The diary lies open under glass in the kitchen. Visitors may climb the tower \
from May to September, but the gallery is closed when the wind is stronger than force seven. \
A ticket costs four pounds, and children enter free. The goats are gone, but the garden is \
still looked after by a group of volunteers, who sell the potatoes in the museum shop."""

_BAKERY = """\
Lena and her brother Oskar run a small bakery on Mill Street in the town of Verrin. Their \
grandmother opened the shop in 1931, and the oven that she bought is still in use. It is made \
of brick, it burns beech wood, and it takes five hours to become hot enough for bread. For \
this reason Oskar lights the fire at ten in the evening, sleeps for a while on a bench beside \
the flour sacks, and begins to bake at three in the morning. Lena arrives at five. She makes \
the pastry, writes the prices on a slate, and opens the door at half past six, when the first \
workers of the paper mill are already waiting.

The bakery sells only six kinds of bread. The most popular is a dark rye loaf with caraway \
seeds, which keeps fresh for a week. The recipe needs a sourdough that is fed twice a day with \
rye flour and warm water. The sourdough is older than the shop: the grandmother carried it \
from her mother's farm in a stone jar wrapped in a wool scarf. Once, in the summer of 1987, a \
careless apprentice put the jar on top of the oven and the sourdough died. A neighbour, the \
schoolteacher Mrs. Falk, had taken a cup of it the week before, and so the family got it back \
from her. Since then a second jar has always been kept in the cellar of the school.

On Saturdays there is a long queue, because on that day Lena bakes plum cake. She uses small \
blue plums from an orchard on the river, and she stops when the plums are finished, usually \
near the end of October. Children who bring back an empty paper bag are given a warm roll. \
Oskar says that the bags cost more than the rolls, but Lena answers that the children will \
still buy their bread here when they are sixty."""

_EXPEDITION = """\
In the spring of 2011 a group of nine scientists sailed to the island of Sorvay to study its \
birds. The island is eight kilometres long and has no trees. Nobody has lived there since \
1922, when the last four families moved to the mainland and left their stone houses to the \
sheep. The leader of the group was Dr. Miriam Okafor, a biologist who had spent ten years \
counting puffins. The ship was called the Petrel, and its captain, Jon Hask, knew the waters \
around the island well, because his grandfather had been born there.

The scientists put up their tents inside the old church, which had lost its roof but gave \
shelter from the wind. Each day they walked the cliffs in pairs. One person counted the nests \
with a telescope while the other wrote the numbers in a waterproof notebook. After three weeks \
they had found 41,000 nests, almost twice as many as in the survey before. Dr. Okafor thought \
that the reason was simple: the rats, which had come ashore from a shipwreck and had eaten the \
eggs for eighty years, were gone. A cold winter and a careful trapping programme had removed \
the last of them in 2004.

The most surprising discovery was made by the youngest member of the group, a student named \
Pavel Ruiz. While he was looking for fresh water he found a small brown bird that nobody could \
name. It had a white stripe above the eye and a song of five falling notes. He recorded the \
song, took two photographs, and collected a feather from the ground. In the laboratory the \
feather showed that the bird was a kind of wren which lived on no other island. It was given \
the name Sorvay wren, and the students of his university printed it on their scarves."""

# The chat markers are the model's own: without them it continues the text instead of answering.
CONTEXTS: tuple[str, ...] = tuple(f"<|im_start|>user\n{text}" for text in (_LIGHTHOUSE, _BAKERY, _EXPEDITION))

_QUESTIONS: tuple[tuple[str, ...], ...] = (
    (
        "Who was the last keeper of the lighthouse?",
        "When was the lighthouse built and by whom?",
        "Why did the crew of the Heron thank the keeper?",
        "Where is the diary of the keeper today?",
    ),
    (
        "Which bread is the most popular?",
        "How many kinds of bread does the bakery sell?",
        "What happened to the sourdough in the summer of 1987?",
        "Why is there a long queue on Saturdays?",
    ),
    (
        "Who was the leader of the group?",
        "What was the name of the ship?",
        "How many nests did the scientists find?",
        "Where did the scientists put up their tents?",
    ),
)

# One tuple of question texts per context; a prompt is CONTEXTS[i] + QUESTIONS[i][j].
QUESTIONS: tuple[tuple[str, ...], ...] = tuple(
    tuple(f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in questions) for questions in _QUESTIONS
)
