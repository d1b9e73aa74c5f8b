//! Writes the files that fuzzing starts from: to `fuzz/corpus/gguf` models of both versions, every value type, several
//! tensors; to `fuzz/corpus/kv_file` sequences plain and coded, evicted and whole.

use std::num::NonZeroUsize;
use std::{error::Error, fs, path::Path};

use entrokv::gguf::{Gguf, GgufWriter, OwnedValue, ValueType};
use entrokv::kv_file::Notes;
use entrokv::tiny::{TinyArchitecture, TinyModel};
use entrokv::{EvictionOptions, Identity, Model, ModelOptions, Request, parse_policy};
use entrokv_kernels::weight_type::WeightType;

fn main() -> Result<(), Box<dyn Error>> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    models(&corpus.join("gguf"))?;
    sequences(&corpus.join("kv_file"))
}

/// KV files of the model of the fuzz target.
fn sequences(folder: &Path) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(folder)?;
    let model = TinyModel { num_layers: 1, ..TinyModel::new(TinyArchitecture::Qwen3) };
    let gguf = Gguf::from_bytes(model.gguf()?)?;
    for cache_type in ["f16", "tq4"] {
        let page_kind = cache_type.parse()?;
        let options = ModelOptions {
            page_kind,
            threads: NonZeroUsize::MIN,
            identity: Identity::Hashed,
            ..ModelOptions::default()
        };
        let mut engine = Model::from_gguf(&gguf, &options, &mut |_| ())?.engine;
        for (len, budget) in [(5, None), (40, Some("32tok")), (190, None), (190, Some("50%"))] {
            let eviction = match budget {
                Some(budget) => {
                    Some(EvictionOptions { budget: budget.parse()?, policy: parse_policy("knorm")?.into() })
                }
                None => None,
            };
            let id = engine.submit(Request { eviction, ..Request::greedy((0..len).collect(), 4) })?;
            engine.finish(id, &mut |_| ())?;
            let mut file = Vec::new();
            engine.save_sequence(id, &Notes::from([("a".to_string(), "note".to_string())]), &mut file)?;
            engine.close(id);
            fs::write(folder.join(format!("{cache_type}-{len}-{}", budget.unwrap_or("all"))), file)?;
        }
    }
    Ok(())
}

/// Model files.
fn models(folder: &Path) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(folder)?;
    for version in [2, 3] {
        fs::write(folder.join(format!("empty-v{version}")), GgufWriter::new().version(version).to_bytes()?)?;
        for alignment in [8, 32, 64] {
            let mut file = values();
            weights(&mut file);
            let bytes = file.version(version).alignment(alignment).to_bytes()?;
            fs::write(folder.join(format!("all-v{version}-a{alignment}")), bytes)?;
        }
    }
    fs::write(folder.join("values"), values().to_bytes()?)?;
    let mut tensors = GgufWriter::new();
    weights(&mut tensors);
    fs::write(folder.join("tensors"), tensors.to_bytes()?)?;
    Ok(())
}

/// One entry of every type, arrays of some, and an array of arrays.
fn values() -> GgufWriter {
    let mut file = GgufWriter::new();
    let nested = vec![OwnedValue::i32s([1, 2]), OwnedValue::strings(["x", ""])];
    file.metadata("u8", OwnedValue::U8(1))
        .metadata("i8", OwnedValue::I8(-1))
        .metadata("u16", OwnedValue::U16(2))
        .metadata("i16", OwnedValue::I16(-2))
        .metadata("u32", 3)
        .metadata("i32", OwnedValue::I32(-3))
        .metadata("u64", OwnedValue::U64(4))
        .metadata("i64", OwnedValue::I64(-4))
        .metadata("f32", 0.5)
        .metadata("f64", OwnedValue::F64(0.25))
        .metadata("bool", true)
        .metadata("string", "text")
        .metadata("strings", OwnedValue::strings(["a", "bc", ""]))
        .metadata("bools", OwnedValue::Array(ValueType::Bool, vec![true.into(), false.into()]))
        .metadata("nested", OwnedValue::Array(ValueType::Array, nested));
    file
}

/// One small tensor of every type, and one of four dimensions.
fn weights(file: &mut GgufWriter) {
    for ty in WeightType::ALL {
        let data = vec![0; 2 * ty.block_bytes()];
        file.tensor(format!("t.{}", ty.name()), ty, &[ty.block_len() as u64, 2], data);
    }
    file.tensor("four", WeightType::F32, &[2, 2, 2, 2], vec![0; 64]);
}
