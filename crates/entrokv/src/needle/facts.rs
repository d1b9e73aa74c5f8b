//! Facts that nobody could guess, each a sentence, a question and an answer.

use super::case::Question;
use super::dice::Dice;

/// What is known of a place, and what kind of value that is.
const THINGS: [(&str, Value); 20] = [
    ("vault code", Value::Number),
    ("night porter", Value::Person),
    ("password", Value::Words),
    ("telephone extension", Value::Number),
    ("head gardener", Value::Person),
    ("locker combination", Value::Number),
    ("call sign", Value::Words),
    ("account number", Value::Number),
    ("chief engineer", Value::Person),
    ("gate code", Value::Number),
    ("code name", Value::Words),
    ("serial number", Value::Number),
    ("watchmaker", Value::Person),
    ("alarm code", Value::Number),
    ("secret word", Value::Words),
    ("license number", Value::Number),
    ("house painter", Value::Person),
    ("registration number", Value::Number),
    ("radio name", Value::Words),
    ("archivist", Value::Person),
];

const NAMES: [&str; 24] = [
    "Aldersey",
    "Brackwater",
    "Corvendale",
    "Dunmarrow",
    "Eastlocke",
    "Fennimore",
    "Garrowby",
    "Hollinsea",
    "Inverlyn",
    "Jarrowfield",
    "Kestrelby",
    "Lanthorpe",
    "Merrowdown",
    "Northgarth",
    "Oakhanger",
    "Pellworth",
    "Quarleston",
    "Ravensholt",
    "Silverwick",
    "Tarnbrook",
    "Ulverscar",
    "Venlow",
    "Westerhope",
    "Yarlside",
];
const PLACES: [&str; 12] = [
    "office",
    "mill",
    "archive",
    "harbour",
    "laboratory",
    "station",
    "library",
    "observatory",
    "hotel",
    "museum",
    "foundry",
    "clinic",
];
const FIRST_NAMES: [&str; 16] = [
    "Imre", "Odile", "Tobias", "Mirela", "Anselm", "Petra", "Lucian", "Greta", "Hamish", "Noemi", "Rufus", "Ingrid",
    "Caspar", "Delia", "Emeric", "Sunniva",
];
const LAST_NAMES: [&str; 16] = [
    "Voss",
    "Kellner",
    "Abara",
    "Whitlock",
    "Draganov",
    "Pym",
    "Sorensen",
    "Maddox",
    "Okafor",
    "Lindqvist",
    "Tanaka",
    "Ferreira",
    "Grole",
    "Hazard",
    "Quist",
    "Bellamy",
];
const COLOURS: [&str; 12] = [
    "copper", "silver", "crimson", "amber", "violet", "ivory", "scarlet", "golden", "purple", "orange", "yellow",
    "green",
];
const THINGS_OF_COLOUR: [&str; 12] = [
    "falcon", "lantern", "harbour", "turtle", "compass", "willow", "hammer", "rocket", "kettle", "badger", "violin",
    "anchor",
];

/// Most facts there can be of one context: no two ask for the same thing.
pub(super) const MOST: usize = THINGS.len();

/// A sentence to hide, and what to ask for it.
pub(super) struct Fact {
    pub(super) sentence: String,
    pub(super) question: Question,
}

#[derive(Clone, Copy)]
enum Value {
    Number,
    Person,
    Words,
}

impl Value {
    fn draw(self, dice: &mut Dice) -> String {
        match self {
            Self::Number => format!("{}", 1000 + dice.below(9000)),
            Self::Person => format!("{} {}", dice.pick(&FIRST_NAMES), dice.pick(&LAST_NAMES)),
            Self::Words => format!("{} {}", dice.pick(&COLOURS), dice.pick(&THINGS_OF_COLOUR)),
        }
    }
}

/// So many facts ([`MOST`] at most) about different things of different places.
pub(super) fn draw(dice: &mut Dice, count: usize) -> Vec<Fact> {
    let (things, names) = (dice.order(THINGS.len()), dice.order(NAMES.len()));
    let facts = things.into_iter().zip(names).take(count).map(|(thing, name)| {
        let (thing, value) = THINGS[thing];
        let subject = format!("{thing} of the {} {}", NAMES[name], dice.pick(&PLACES));
        let answer = value.draw(dice);
        let ask = if matches!(value, Value::Person) { "Who" } else { "What" };
        let prefix = format!("The {subject} is");
        Fact {
            sentence: format!("{prefix} {answer}."),
            question: Question { question: format!("{ask} is the {subject}?"), prefix, answer, depth: None },
        }
    });
    facts.collect()
}
