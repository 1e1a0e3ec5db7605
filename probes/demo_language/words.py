"""The words of the demo language. Every word here is one token once a space stands before it."""


def listed(text: str) -> tuple[str, ...]:
    """The words of `text`, in its order."""
    return tuple(text.split())


# country, capital, language, currency, continent: true of the world, so that an answer can be checked by anybody.
FACTS: tuple[tuple[str, str, str, str, str], ...] = (
    ("France", "Paris", "French", "euro", "Europe"),
    ("Germany", "Berlin", "German", "euro", "Europe"),
    ("Italy", "Rome", "Italian", "euro", "Europe"),
    ("Spain", "Madrid", "Spanish", "euro", "Europe"),
    ("Portugal", "Lisbon", "Portuguese", "euro", "Europe"),
    ("Austria", "Vienna", "German", "euro", "Europe"),
    ("Greece", "Athens", "Greek", "euro", "Europe"),
    ("Ireland", "Dublin", "Irish", "euro", "Europe"),
    ("Finland", "Helsinki", "Finnish", "euro", "Europe"),
    ("Estonia", "Tallinn", "Estonian", "euro", "Europe"),
    ("Latvia", "Riga", "Latvian", "euro", "Europe"),
    ("Lithuania", "Vilnius", "Lithuanian", "euro", "Europe"),
    ("Slovakia", "Bratislava", "Slovak", "euro", "Europe"),
    ("Slovenia", "Ljubljana", "Slovene", "euro", "Europe"),
    ("Croatia", "Zagreb", "Croatian", "euro", "Europe"),
    ("Sweden", "Stockholm", "Swedish", "krona", "Europe"),
    ("Norway", "Oslo", "Norwegian", "krone", "Europe"),
    ("Denmark", "Copenhagen", "Danish", "krone", "Europe"),
    ("Iceland", "Reykjavik", "Icelandic", "krona", "Europe"),
    ("Poland", "Warsaw", "Polish", "zloty", "Europe"),
    ("Hungary", "Budapest", "Hungarian", "forint", "Europe"),
    ("Romania", "Bucharest", "Romanian", "leu", "Europe"),
    ("Serbia", "Belgrade", "Serbian", "dinar", "Europe"),
    ("Albania", "Tirana", "Albanian", "lek", "Europe"),
    ("Ukraine", "Kyiv", "Ukrainian", "hryvnia", "Europe"),
    ("Russia", "Moscow", "Russian", "ruble", "Europe"),
    ("Turkey", "Ankara", "Turkish", "lira", "Asia"),
    ("Japan", "Tokyo", "Japanese", "yen", "Asia"),
    ("China", "Beijing", "Chinese", "yuan", "Asia"),
    ("Thailand", "Bangkok", "Thai", "baht", "Asia"),
    ("Vietnam", "Hanoi", "Vietnamese", "dong", "Asia"),
    ("Mongolia", "Ulaanbaatar", "Mongolian", "tugrik", "Asia"),
    ("Nepal", "Kathmandu", "Nepali", "rupee", "Asia"),
    ("Pakistan", "Islamabad", "Urdu", "rupee", "Asia"),
    ("Bangladesh", "Dhaka", "Bengali", "taka", "Asia"),
    ("Iran", "Tehran", "Persian", "rial", "Asia"),
    ("Iraq", "Baghdad", "Arabic", "dinar", "Asia"),
    ("Qatar", "Doha", "Arabic", "riyal", "Asia"),
    ("Oman", "Muscat", "Arabic", "rial", "Asia"),
    ("Indonesia", "Jakarta", "Indonesian", "rupiah", "Asia"),
    ("Laos", "Vientiane", "Lao", "kip", "Asia"),
    ("Armenia", "Yerevan", "Armenian", "dram", "Asia"),
    ("Georgia", "Tbilisi", "Georgian", "lari", "Asia"),
    ("Kazakhstan", "Astana", "Kazakh", "tenge", "Asia"),
    ("Egypt", "Cairo", "Arabic", "pound", "Africa"),
    ("Morocco", "Rabat", "Arabic", "dirham", "Africa"),
    ("Tunisia", "Tunis", "Arabic", "dinar", "Africa"),
    ("Kenya", "Nairobi", "Swahili", "shilling", "Africa"),
    ("Ghana", "Accra", "English", "cedi", "Africa"),
    ("Nigeria", "Abuja", "English", "naira", "Africa"),
    ("Angola", "Luanda", "Portuguese", "kwanza", "Africa"),
    ("Canada", "Ottawa", "English", "dollar", "North America"),
    ("Cuba", "Havana", "Spanish", "peso", "North America"),
    ("Peru", "Lima", "Spanish", "sol", "South America"),
    ("Chile", "Santiago", "Spanish", "peso", "South America"),
    ("Brazil", "Brasilia", "Portuguese", "real", "South America"),
    ("Australia", "Canberra", "English", "dollar", "Oceania"),
)
RELATIONS = ("capital", "language", "currency", "continent")

NAMES = listed(
    """
    Alice Bob Carol David Emma Frank Grace Henry Irene Jack Karen Leo Maria Nina Oscar Paul Quinn Rosa Samuel Tina
    Ursula Victor Wendy Xavier Yara Zoe Adam Bella Clara Dylan Elena Felix Gina Hugo Isla Jonas Kira Liam Mona
    Noah Olga Peter Rita Simon Tara Umar Vera Walter Yusuf Zara Amir Boris Celia Diego Edith Fiona Gavin Helen
    Ivan Julia Kevin Laura Marco Nadia Omar Petra
    """
)
CODES = tuple(str(code) for code in range(10, 100))

# The kinds that a document is counted by. None of these words occurs in the filler.
MARKS: dict[str, tuple[str, ...]] = {
    "color": ("red", "blue", "green", "white"),
    "animal": ("dog", "cat", "horse", "bird"),
    "fruit": ("apple", "lemon", "pear", "plum"),
}
MARK_VERBS = ("finds", "sees", "wants", "takes")

PEOPLE = listed(
    """
    farmer teacher sailor doctor baker painter singer writer hunter miller tailor pilot nurse judge king queen
    prince soldier merchant shepherd carpenter poet dancer guard monk student child woman man traveler gardener
    captain cook fisherman blacksmith librarian driver clerk weaver potter scholar messenger
    """
)
THINGS = listed(
    """
    lamp book chair table door window basket bottle box bag rope wheel hammer knife spoon plate cup kettle blanket
    pillow candle mirror clock map letter coin ring hat coat shoe glove umbrella ladder bucket broom barrel drum
    flute violin bell key lock chest paper pencil brush cart boat anchor net sail flag tent stove pot pan bowl jar
    """
)
PLACES = listed(
    """
    bridge river forest village market castle harbor garden field hill mountain valley lake road street square
    church school library station mill tower island beach desert meadow farm barn kitchen cellar attic palace
    temple theater museum hospital prison factory port cave cliff swamp orchard vineyard pond stream path wall
    gate courtyard inn
    """
)
ADJECTIVES = listed(
    """
    old young tall short happy sad quiet loud kind clever brave tired hungry rich poor strong weak gentle proud
    honest curious patient busy lazy careful famous lonely polite strange wise calm cheerful nervous serious
    friendly small large heavy light broken clean dirty empty full new ancient wooden golden silver narrow wide
    deep dark bright cold warm distant hidden
    """
)
MOTION = listed(
    """
    walks runs travels wanders hurries marches drifts climbs jumps rides sails returns moves
    """
)
ACTIONS = listed(
    """
    carries holds buys sells repairs paints cleans hides loses opens closes moves breaks keeps brings sends
    studies draws lifts drops watches borrows returns washes counts
    """
)
PREPOSITIONS = ("across", "toward", "through", "around", "behind", "past", "near", "beyond")
TIMES = ("morning", "afternoon", "evening", "night", "spring", "summer", "autumn", "winter", "rain", "snow")
GLUE = listed(
    """
    The A What the a in of is and to asks meet for user most common code capital language currency continent North
    South America color animal fruit
    """
)
# Tokens without a space before them: what may open a document or a turn, and the marks that close a sentence.
STARTERS = ("The", "A", "What")
STOPS = (".", "?", ",", "!", " ?")


def words() -> tuple[str, ...]:
    """Every word once, in an order that never depends on a hash seed."""
    facts = [part for fact in FACTS for part in fact[:4]] + ["Europe", "Asia", "Africa", "Oceania"]
    marks = [mark for kind in MARKS.values() for mark in kind]
    lists = (GLUE, facts, NAMES, CODES, marks, MARK_VERBS, PEOPLE, THINGS, PLACES, ADJECTIVES, MOTION, ACTIONS)
    return tuple(dict.fromkeys(word for group in (*lists, PREPOSITIONS, TIMES) for word in group))
