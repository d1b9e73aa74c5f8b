//! How the options of a policy are spelled on a command line: `key=value` items parted by commas.
//!
//! Invariant: the canonical text of any options, read back, gives the same options.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::policy::{EvictionPolicy, Granularity, PolicyError};
use crate::token_policy::{Options, TokenMethod, TokenPolicy};

/// Keys that say how it is decided, not how anything is scored.
const DECISION_KEYS: [&str; 6] = ["allot", "share", "granularity", "schedule", "pack", "tiers"];

/// The part of a policy's canonical `text` that its scores depend on, which are those of pages or of tokens.
pub(crate) fn scoring(text: &str, granularity: Granularity) -> String {
    let (name, options) = text.split_once(':').unwrap_or((text, ""));
    let is_score = |item: &&str| item.split_once('=').is_none_or(|(key, _)| !DECISION_KEYS.contains(&key));
    let options: Vec<&str> = options.split(',').filter(is_score).collect();
    format!("{name}:{} of {}", options.join(","), spelling(granularity, &Granularity::WORDS))
}

/// One option: its key, its values in words, how a value is read and how it is shown.
pub(crate) struct OptionKey<T> {
    pub(crate) key: &'static str,
    pub(crate) expected: &'static str,
    pub(crate) read: fn(&mut T, &str) -> Option<()>,
    pub(crate) show: fn(&T) -> String,
}

/// A name that `preset` may be, and the options it stands for.
pub(crate) type Preset<T> = (&'static str, fn() -> T);

/// A key under which a whole set of options is given; it is applied before the others, wherever it stands.
const PRESET_KEY: &str = "preset";

/// The options of one named policy.
pub(crate) struct OptionSet<T: 'static> {
    /// Name of the policy.
    pub(crate) policy: &'static str,
    /// The keys in canonical order, in one list or several.
    pub(crate) keys: &'static [&'static [OptionKey<T>]],
    /// Keys that have no meaning for it.
    pub(crate) without: &'static [&'static str],
    /// What `preset` may be; empty where there is none.
    pub(crate) presets: &'static [Preset<T>],
    /// What is not given.
    pub(crate) default: fn() -> T,
}

impl<T> OptionSet<T> {
    /// Options read from `key=value` items parted by commas; `None` is none given.
    pub(crate) fn parse(&self, text: Option<&str>) -> Result<T, PolicyError> {
        let mut items = Vec::new();
        for item in text.into_iter().flat_map(|text| text.split(',')) {
            let (key, value) = item.split_once('=').ok_or_else(|| PolicyError::NotAnOption {
                policy: self.policy,
                got: item.trim().to_owned(),
                known: self.known(),
            })?;
            items.push((key.trim(), value.trim()));
        }

        let mut options = (self.default)();
        let mut seen = Vec::new();
        // The preset first and the others in canonical order, so that the order on the line does not matter.
        let place = |key: &str| self.keys().position(|option| option.key == key);
        items.sort_by_key(|(key, _)| (*key != PRESET_KEY, place(key)));
        for (key, value) in items {
            if key == PRESET_KEY && !self.presets.is_empty() {
                let preset = self.presets.iter().find(|(name, _)| *name == value);
                let Some((_, preset)) = preset else {
                    return Err(self.bad_value(PRESET_KEY, self.preset_names(), value));
                };
                options = preset();
                self.note(PRESET_KEY, &mut seen)?;
                continue;
            }
            let option = self.keys().find(|option| option.key == key).ok_or_else(|| PolicyError::UnknownOption {
                policy: self.policy,
                got: key.to_owned(),
                known: self.known(),
            })?;
            let read = (option.read)(&mut options, value);
            read.ok_or_else(|| self.bad_value(option.key, option.expected.to_owned(), value))?;
            self.note(option.key, &mut seen)?;
        }
        Ok(options)
    }

    /// Refuses options whose values are out of range.
    pub(crate) fn check(&self, options: &T) -> Result<(), PolicyError> {
        // A value is in range when its own text reads back as it.
        for option in self.keys() {
            let text = (option.show)(options);
            if (option.read)(&mut (self.default)(), &text).is_none() {
                return Err(self.bad_value(option.key, option.expected.to_owned(), &text));
            }
        }
        Ok(())
    }

    /// Writes the policy's name and the options that depart from its default, in canonical order.
    pub(crate) fn write(&self, options: &T, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.policy)?;
        let default = (self.default)();
        let mut separator = ':';
        for option in self.keys() {
            let value = (option.show)(options);
            if value != (option.show)(&default) {
                write!(f, "{separator}{}={value}", option.key)?;
                separator = ',';
            }
        }
        Ok(())
    }

    fn keys(&self) -> impl Iterator<Item = &'static OptionKey<T>> + use<T> {
        let without = self.without;
        self.keys.iter().copied().flatten().filter(move |option| !without.contains(&option.key))
    }

    fn known(&self) -> String {
        let preset = (!self.presets.is_empty()).then(|| format!("{PRESET_KEY} ({})", self.preset_names()));
        let others = self.keys().map(|option| format!("{} ({})", option.key, option.expected));
        preset.into_iter().chain(others).collect::<Vec<_>>().join(", ")
    }

    fn preset_names(&self) -> String {
        self.presets.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(" or ")
    }

    fn bad_value(&self, key: &'static str, expected: String, got: &str) -> PolicyError {
        PolicyError::BadValue { policy: self.policy, key, expected, got: got.to_owned() }
    }

    fn note(&self, key: &'static str, seen: &mut Vec<&'static str>) -> Result<(), PolicyError> {
        if seen.contains(&key) {
            return Err(PolicyError::Repeated { policy: self.policy, key });
        }
        seen.push(key);
        Ok(())
    }
}

impl<M: TokenMethod + 'static> OptionSet<Options<M>> {
    /// The policy of a method with these options.
    pub(crate) fn policy(&self, options: Options<M>) -> Box<dyn EvictionPolicy> {
        let text = fmt::from_fn(|f| self.write(&options, f)).to_string();
        Box::new(TokenPolicy::spelled(self.policy, options.method, options.axes, text))
    }
}

/// What an option that is on or off may be.
pub(crate) const YES_NO: [(&str, bool); 2] = [("no", false), ("yes", true)];

/// An integer that is `least` or more.
pub(crate) fn at_least(text: &str, least: usize) -> Option<usize> {
    text.parse().ok().filter(|number| *number >= least)
}

/// A file's name. One with a comma in it cannot be spelled, since commas part options.
pub(crate) fn file(text: &str) -> Option<PathBuf> {
    (!text.is_empty()).then(|| PathBuf::from(text))
}

/// The text of a file's name; empty where none is given.
pub(crate) fn file_text(file: Option<&Path>) -> String {
    file.map_or_else(String::new, |file| file.display().to_string())
}

/// The value a word stands for.
pub(crate) fn word<T: Copy>(text: &str, words: &[(&str, T)]) -> Option<T> {
    words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value)
}

/// The word that stands for a value.
pub(crate) fn spelling<T: Copy + PartialEq>(value: T, words: &[(&str, T)]) -> String {
    let word = words.iter().find(|(_, candidate)| *candidate == value);
    word.map(|(word, _)| (*word).to_owned()).expect("every value has a word")
}
