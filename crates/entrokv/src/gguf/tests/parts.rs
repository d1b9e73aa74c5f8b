//! Models in several files: any part opens all, and a part that is missing or wrong is named.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::*;

/// What part `no` of `count` says, when the whole has `num_tensors` tensors.
fn part(no: u16, count: u16, num_tensors: i32, tensors: &[&str]) -> GgufWriter {
    let mut file = GgufWriter::new();
    file.metadata("split.no", OwnedValue::U16(no))
        .metadata("split.count", OwnedValue::U16(count))
        .metadata("split.tensors.count", OwnedValue::I32(num_tensors));
    if no == 0 {
        file.metadata("general.architecture", "llama");
    }
    for name in tensors {
        file.tensor(*name, WeightType::F32, &[2], vec![no as u8; 8]);
    }
    file
}

fn write(folder: &Path, name: &str, file: &GgufWriter) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, bytes_of(file)).expect("a writable folder");
    path
}

/// Three parts of five tensors.
fn three(folder: &Path) -> [PathBuf; 3] {
    [
        write(folder, "m-00001-of-00003.gguf", &part(0, 3, 5, &["a", "b"])),
        write(folder, "m-00002-of-00003.gguf", &part(1, 3, 5, &["output.weight"])),
        write(folder, "m-00003-of-00003.gguf", &part(2, 3, 5, &["d", "e"])),
    ]
}

fn refused(path: &Path) -> String {
    Gguf::open(path).expect_err("the parts must be refused").to_string()
}

#[test]
fn any_part_opens_all_of_them() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for path in three(folder.path()) {
        let model = Gguf::open(&path).expect("three good parts");
        let names: Vec<_> = model.tensors().map(|t| t.name).collect();
        assert_eq!(names, ["a", "b", "output.weight", "d", "e"]);
        // A tensor that only another part holds is found, with that part's bytes: nothing is taken for tied.
        assert_eq!(model.tensor("output.weight").map(|t| t.data), Some(&[1; 8][..]));
        assert_eq!(model.metadata().str("general.architecture"), Ok("llama"));
        assert_eq!(model.num_files(), 3);
        assert_eq!(model.file_bytes(), model.parts.iter().map(|p| p.len() as u64).sum::<u64>());
    }
}

#[test]
fn a_missing_part_is_named() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let [first, second, _] = three(folder.path());
    fs::remove_file(&second).expect("it is there");
    assert_eq!(
        refused(&first),
        format!("{}: part 2 of 3 is missing: {} does not exist", first.display(), second.display())
    );
}

#[test]
fn a_part_under_another_name_says_how_it_must_be_called() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = write(folder.path(), "renamed.gguf", &part(1, 3, 5, &["a"]));
    assert_eq!(
        refused(&path),
        format!("{}: part 2 of 3 of a split model: its file name must end in -00002-of-00003.gguf", path.display())
    );
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let [first, second, third] = three(folder.path());
    let good = fs::read(&second).expect("it is there");
    let cases = [
        (part(2, 3, 5, &["c"]), format!("{} calls itself part 3 of 3: part 2 of 3 is expected", second.display())),
        (part(1, 4, 5, &["c"]), format!("{} calls itself part 2 of 4: part 2 of 3 is expected", second.display())),
        (sample(), format!("{} calls itself part 1 of 1: part 2 of 3 is expected", second.display())),
        (part(1, 3, 5, &["a"]), "tensor \"a\" appears twice".to_owned()),
        (part(1, 3, 5, &["c", "f"]), "the 3 parts hold 6 tensors together: split.tensors.count says 5".to_owned()),
    ];
    for (file, expected) in cases {
        fs::write(&second, bytes_of(&file)).expect("a writable folder");
        assert_eq!(refused(&first), format!("{}: {expected}", first.display()));
    }
    // An error inside a part names the part, not the file that was opened.
    fs::write(&second, b"not found").expect("a writable folder");
    let message = refused(&first);
    assert!(message.starts_with(&format!("{}: not a GGUF file", second.display())), "{message}");
    fs::write(&second, good).expect("a writable folder");
    assert!(Gguf::open(&third).is_ok());
}

#[test]
fn numbers_of_parts_are_checked() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = write(folder.path(), "m-00004-of-00003.gguf", &part(3, 3, 5, &["a"]));
    assert_eq!(refused(&path), format!("{}: split.no is 3, but split.count is 3", path.display()));
    let alone = write(folder.path(), "m-00001-of-65535.gguf", &part(0, 65_535, 5, &["a"]));
    assert!(refused(&alone).contains("part 2 of 65535 is missing"));
    let single = write(folder.path(), "single.gguf", &part(0, 1, 1, &["a"]));
    assert_eq!(Gguf::open(&single).expect("one part is a whole").tensors().len(), 1);
}

#[test]
fn one_part_in_memory_is_no_model() {
    assert_eq!(
        refusal(bytes_of(&part(1, 3, 5, &["a"]))),
        "the model in memory: part 2 of 3 of a split model: open it by its path, so that the other parts are found"
    );
}
