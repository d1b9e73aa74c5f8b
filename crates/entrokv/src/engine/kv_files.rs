//! Sequences into files and back: what an engine checks before it takes one in.

use std::io::{Read, Write};
use std::sync::Arc;

use entrokv_cache::{KvCache, PageCost, PagePlace, PageRecord, ResidentPage};

use super::{Engine, Ledger};
use crate::coding::{Coding, SavedCoding};
use crate::eviction::Eviction;
use crate::kv_file::{
    self, Contents, FORMAT_VERSION, Header, KvFileError, KvFileReader, LoadOptions, LoadedSequence, Notes, SaveError,
    SavedModel,
};
use crate::segments::SegmentLists;
use crate::sequence::{EvictionOptions, Sequence, SequenceId, Turn};
use crate::turned_sinks::TurnedSinks;

impl Engine {
    /// Writes `id`, which has finished or was cancelled, with its cache and `notes` to `out`; returns the bytes of the file.
    ///
    /// # Errors
    /// [`SaveError`]; what `out` has received by then is no file. [`PendingFile`](kv_file::PendingFile) forgets it.
    pub fn save_sequence(&self, id: SequenceId, notes: &Notes, out: &mut dyn Write) -> Result<u64, SaveError> {
        let sequence = self.sequences.get(&id).ok_or(SaveError::Unknown(id))?;
        if sequence.turn.finished.is_none() {
            return Err(SaveError::Busy(id));
        }
        if let Some(eviction) = &sequence.turn.eviction {
            kv_file::check_policy(eviction.policy())?;
        }
        if self.shape.groups().any(|group| sequence.cache.num_settled(group) > 0) {
            return Err(SaveError::Tiers(id));
        }
        if !sequence.turned_sinks.is_empty() {
            return Err(SaveError::TurnedSinks(id));
        }
        let model = self.saved_model().ok_or(SaveError::NoModelId)?;
        let contents = self.contents(sequence, model, notes.clone());
        let groups: Vec<_> = self.shape.groups().collect();
        let mut page_bytes = |group: usize, place: usize, out: &mut Vec<u8>| {
            let page = &sequence.cache.table(groups[group])[place];
            let len = contents.tables[group][place].len as usize;
            self.runner.page_bytes(&PagePlace { kind: page.kind, range: page.range() }, len, out);
        };
        Ok(kv_file::write(out, &contents, &self.shape, &mut page_bytes)?)
    }

    /// Takes in the sequence that `input` is the file of: it has finished, and [`Engine::extend`] goes on with it.
    ///
    /// The next tokens and their logits are those of the sequence that was saved, to the bit, on the same instruction set.
    ///
    /// # Errors
    /// [`KvFileError`], a line that names what does not fit; nothing has changed then.
    pub fn load_sequence(
        &mut self,
        input: &mut dyn Read,
        options: &LoadOptions,
    ) -> Result<LoadedSequence, KvFileError> {
        let mut file = KvFileReader::open(input)?;
        let read = self.read_sequence(&mut file, options);
        let (sequence, eviction) = read.map_err(|error| file.blame(error))?;
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        self.sequences.insert(id, sequence);
        Ok(LoadedSequence { id, eviction, notes: file.header().notes.clone() })
    }

    /// The model as files name it.
    fn saved_model(&self) -> Option<SavedModel> {
        let id = self.options.model_id?;
        Some(SavedModel::new(&self.runner.config().name, id, &self.shape))
    }

    /// What a file of `sequence` has beside its pages.
    fn contents(&self, sequence: &Sequence, model: SavedModel, notes: Notes) -> Contents {
        let Sequence { tokens, computed, cache, coding, turn, .. } = sequence;
        // A step that was interrupted has opened pages for tokens that it did not compute.
        let record = |page: &ResidentPage| {
            let filled = computed.saturating_sub(page.first_position(self.shape.page_size) as usize) as u32;
            PageRecord { len: page.len.min(filled), ..page.record() }
        };
        let is_filled = |page: &PageRecord| page.len > 0;
        let table = |group| cache.table(group).iter().map(record).filter(is_filled).collect();
        let tables: Vec<Vec<PageRecord>> = self.shape.groups().map(table).collect();
        let SavedCoding { constants, query_squares, behind } = coding.as_ref().map(Coding::saved).unwrap_or_default();
        let header = Header {
            version: FORMAT_VERSION,
            writer: concat!("entrokv ", env!("CARGO_PKG_VERSION")).to_owned(),
            model,
            cache_type: self.options.page_kind.to_string(),
            computed: *computed,
            prompt_end: turn.prompt_end,
            kinds: Contents::kinds_of(&tables).iter().map(ToString::to_string).collect(),
            behind,
            eviction: turn.eviction.as_ref().map(Eviction::saved),
            notes,
        };
        Contents { header, tokens: tokens.clone(), tables, constants, query_squares }
    }

    /// The sequence in `file`, its pages in the pool, and its cap.
    fn read_sequence(
        &mut self,
        file: &mut KvFileReader<'_>,
        options: &LoadOptions,
    ) -> Result<(Sequence, Option<EvictionOptions>), KvFileError> {
        let kind = self.options.page_kind;
        let Header { model, cache_type, eviction: cap, .. } = file.header();
        model.check(&self.saved_model().ok_or(KvFileError::NoModelId)?)?;
        if *cache_type != kind.to_string() {
            return Err(KvFileError::CacheType { got: cache_type.clone(), wanted: kind });
        }
        let cap = match cap {
            Some(cap) => {
                let options = cap.options(options.policy.as_ref())?;
                let cost = PageCost::from(kind.written_as());
                Some((
                    Eviction::resting(cap, &options, &self.shape, cost, self.runner.config().attention_scale)?,
                    options,
                ))
            }
            None => None,
        };
        let (resting, eviction) = cap.unzip();

        let contents = file.contents(&self.shape, kind)?;
        self.check_tokens(&contents)?;
        let cache = self.read_cache(file, &contents)?;
        let Contents { header, tokens, constants, query_squares, .. } = contents;
        let Header { computed, prompt_end, behind, .. } = header;
        let coding = Coding::resume(&self.shape, kind, SavedCoding { constants, query_squares, behind });
        let turn = Turn::resting(prompt_end, resting);
        let sequence = Sequence {
            tokens,
            computed,
            cache,
            segments: SegmentLists::new(&self.shape),
            coding,
            turned_sinks: TurnedSinks::default(),
            ledger: Ledger::default(),
            turn,
        };
        Ok((sequence, eviction))
    }

    /// Whether the tokens of a file are tokens here.
    fn check_tokens(&self, contents: &Contents) -> Result<(), KvFileError> {
        let (tokens, computed, prompt_end) = (&contents.tokens, contents.header.computed, contents.header.prompt_end);
        if computed.max(prompt_end) > tokens.len() {
            let what = format!("{computed} tokens are computed and {prompt_end} of prompts, of {}", tokens.len());
            return Err(KvFileError::Malformed(what));
        }
        if tokens.len() > self.context_len {
            return Err(KvFileError::Context { got: tokens.len(), limit: self.context_len });
        }
        let limit = self.runner.vocab_size();
        match tokens.iter().find(|&&token| token as usize >= limit) {
            Some(got) => Err(KvFileError::Malformed(format!("token id {got} is outside the vocabulary of {limit}"))),
            None => Ok(()),
        }
    }

    /// The cache of a file, read to the end of it; the pool is as before where that fails.
    fn read_cache(&mut self, file: &mut KvFileReader<'_>, contents: &Contents) -> Result<KvCache, KvFileError> {
        let (shape, written) = (Arc::clone(&self.shape), self.options.page_kind.written_as());
        let cache = KvCache::restore(shape, written, contents.header.computed, &contents.tables, &mut self.pool)?;
        let groups: Vec<_> = self.shape.groups().collect();
        let mut bytes = Vec::new();
        let mut read = || {
            for (group, place, record) in contents.pages() {
                file.page(record.kind.page_bytes(&self.shape), &mut bytes)?;
                let range = cache.table(groups[group])[place].range();
                self.runner.set_page_bytes(&PagePlace { kind: record.kind, range }, &bytes);
            }
            file.finish()
        };
        match read() {
            Ok(()) => Ok(cache),
            Err(error) => {
                self.retire(cache);
                Err(error)
            }
        }
    }
}
