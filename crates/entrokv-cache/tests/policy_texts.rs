//! How policies are spelled, and what a wrong spelling says.

#![allow(clippy::unwrap_used)] // what does not parse here is a failed test

use entrokv_cache::{
    Allotment, BlockProjection, Granularity, LeastBudget, ObservedRow, POLICIES, Packing, PageEntroKv,
    PageEntroKvOptions, PoolOn, PooledPages, Pooling, RecentPages, RenyiOrder, Rotation, RowOrigin, RowTap, Schedule,
    Taps, parse_policy,
};

fn options(text: &str) -> PageEntroKvOptions {
    PageEntroKv::parse(Some(text)).unwrap().options().clone()
}

#[test]
fn every_option_can_be_set() {
    let text = "sinks=8,alpha=inf,tau=0.25,pooling=max,row=window:16,pool_on=isolated,block=sum,pool=7,recent=3,decay=0.9,allot=global,granularity=token,schedule=every:64,pack=score,rows=probe,tiers=tq4:3nats+tq3v2";
    let expected = PageEntroKvOptions {
        sinks: 8,
        order: RenyiOrder::MIN,
        tau: 0.25,
        pooling: Pooling::Max,
        row: ObservedRow::Window(16),
        pool_on: PoolOn::Isolated,
        block: BlockProjection::Sum,
        pool_width: 7,
        recent: RecentPages::Count(3),
        decay: 0.9,
        allotment: Allotment::Global,
        granularity: Granularity::Token,
        schedule: Schedule::Every(std::num::NonZeroU32::new(64).unwrap()),
        rows: RowOrigin::Probe,
        packing: Packing::Score,
        tiers: Some("tq4:3nats+tq3v2".parse().unwrap()),
    };
    assert_eq!(options(text), expected);
    let policy = PageEntroKv::new(expected).unwrap();
    assert_eq!(policy.to_string(), format!("page-entro-kv:{text}"));
}

#[test]
fn presets_come_first_wherever_they_stand() {
    assert_eq!(PageEntroKv::parse(None).unwrap(), PageEntroKv::default());
    assert_eq!(options("preset=paper"), PageEntroKvOptions::paper());
    assert_eq!(options("preset=paper").schedule, Schedule::Once);
    assert_eq!(options("preset=paper,schedule=rolling"), PageEntroKvOptions::default());
    let serving = PageEntroKvOptions { tau: 1.0, ..PageEntroKvOptions::serving() };
    assert_eq!(options("preset=serving,tau=1"), serving);
    assert_eq!(options(" tau = 1 , preset = serving "), serving);
    assert_eq!(options("row=last,preset=serving").row, ObservedRow::Last);
    assert_eq!(options("row=last,preset=serving").pool_width, 5);
}

#[test]
fn policies_say_what_they_need() {
    struct Case {
        text: &'static str,
        name: &'static str,
        taps: Taps,
        schedule: Schedule,
        sink_tokens: usize,
        recent_pages: RecentPages,
    }
    let cases = [
        Case {
            text: "page-entro-kv",
            name: "page-entro-kv",
            taps: Taps { prompt: RowTap::Last, step_rows: true, ..Taps::default() },
            schedule: Schedule::Rolling,
            sink_tokens: 4,
            recent_pages: RecentPages::Count(0),
        },
        Case {
            text: "page-entro-kv:preset=serving",
            name: "page-entro-kv",
            taps: Taps { prompt: RowTap::Window(32), step_rows: true, ..Taps::default() },
            schedule: Schedule::Rolling,
            sink_tokens: 4,
            recent_pages: RecentPages::Quarter,
        },
        Case {
            text: "mean-pages:schedule=once,row=accumulated,sinks=0,recent=2",
            name: "mean-pages",
            taps: Taps { prompt: RowTap::Accumulated, step_rows: false, ..Taps::default() },
            schedule: Schedule::Once,
            sink_tokens: 0,
            recent_pages: RecentPages::Count(2),
        },
    ];
    for case in cases {
        let policy = parse_policy(case.text).unwrap();
        assert_eq!(policy.name(), case.name);
        assert_eq!(policy.needs(), case.taps, "{}", case.text);
        assert_eq!(policy.schedule(), case.schedule, "{}", case.text);
        let pins = policy.pins();
        assert_eq!((pins.sink_tokens, pins.recent_pages), (case.sink_tokens, case.recent_pages), "{}", case.text);
    }
}

#[test]
fn the_mean_is_the_mean_and_the_maximum_the_maximum_whatever_the_preset() {
    for text in [None, Some("preset=serving"), Some("preset=paper")] {
        assert_eq!(PooledPages::mean(text).unwrap().options().pooling, Pooling::Mean, "{text:?}");
        assert_eq!(PooledPages::max(text).unwrap().options().pooling, Pooling::Max, "{text:?}");
    }
    let serving = PooledPages::mean(Some("preset=serving")).unwrap();
    assert_eq!(serving.to_string(), "mean-pages:row=window:32,pool=5,recent=quarter");
    let again = PooledPages::mean(Some("row=window:32,pool=5,recent=quarter")).unwrap();
    assert_eq!(again.options(), serving.options());
    assert_eq!(PooledPages::max(Some("block=sum")).unwrap().to_string(), "max-pages:block=sum");
}

#[test]
fn wrong_spellings_say_what_would_be_right() {
    let refused = |text: &str| parse_policy(text).unwrap_err().to_string();
    let known = "page-entro-kv, mean-pages, max-pages, ada-kv, compactor, critical-kv, cur, dms, duo-attention, \
                 expected-attention, fastgen, fast-kvzip, h2o, keydiff, knorm, kv-compress, kvzap, kvzip, lagkv, \
                 observed-attention, paged-eviction, pyramid-kv, quest, r-kv, random, rocketkv, scissorhands, snapkv, \
                 streaming-llm, think, tova";
    assert_eq!(refused("h3o"), format!("unknown policy `h3o`; known are {known}"));
    assert_eq!(refused(""), format!("unknown policy ``; known are {known}"));
    assert_eq!(refused("none"), format!("`none` keeps every page and is not a policy; known are {known}"));
    let cases = [
        ("snapkv:kernel=4", "option `kernel` of snapkv is an odd number of tokens from 1 to 255, got `4`"),
        ("snapkv:preset=fast", "option `preset` of snapkv is official or kvpress, got `fast`"),
        (
            "fast-kvzip",
            "fast-kvzip needs gates trained for the model: fast-kvzip:gates=FILE, a file of the safetensors format",
        ),
        ("dms:scale=0", "option `scale` of dms is a number above 0, got `0`"),
        ("dms:offset=inf", "option `offset` of dms is a number, got `inf`"),
        (
            "duo-attention:streaming=1.5",
            "option `streaming` of duo-attention is a part of the heads from 0 to 1, got `1.5`",
        ),
        ("kvzap:gates=", "option `gates` of kvzap is a file, got ``"),
        ("kvzap:tau=NaN", "option `tau` of kvzap is a threshold, or none, got `NaN`"),
        ("kvzap:window=0", "option `window` of kvzap is a number of tokens, 1 or more, got `0`"),
        (
            "fast-kvzip:window=2%",
            "option `window` of fast-kvzip is auto (2 % of the tokens, 4096 from 32000 on) or a number of tokens, got `2%`",
        ),
        ("kvzip:chunk=15", "option `chunk` of kvzip is a number of tokens, 16 or more, got `15`"),
        ("streaming-llm:rerotate=yes", "option `rerotate` of streaming-llm is true or false, got `yes`"),
        (
            "critical-kv:inner=knorm",
            "option `inner` of critical-kv is snapkv, expected-attention, h2o, observed-attention, tova, cur or lagkv, got `knorm`",
        ),
        (
            "ada-kv:normalise=yes,preset=kvpress",
            "option `normalise` of ada-kv is no, or yes with allot=ada-interpolated:A, got `yes`",
        ),
        (
            "rocketkv:channels=8",
            "option `channels` of rocketkv is a number of channels, 1 or more, with tokens=N, got `8`",
        ),
        (
            "rocketkv:tokens=64,granularity=token",
            "option `tokens` of rocketkv is all, or a number of tokens, 1 or more, with granularity=page, got `64`",
        ),
        ("think:fraction=1", "option `fraction` of think is a part of the channels from 0 to below 1, got `1`"),
        ("quest:tokens=0", "option `tokens` of quest is a number of tokens, 1 or more, got `0`"),
        ("quest:heads=mean", "option `heads` of quest is max or sum, got `mean`"),
        ("lagkv:lag=1", "option `lag` of lagkv is a number of tokens, 2 or more, got `1`"),
        (
            "knorm:allot=ada-floor:2",
            "option `allot` of knorm is uniform, global, prices, pyramid, pyramid:B or pyramid-official:B with B above 1, \
             ada-floor:A or ada-interpolated:A with A from 0 to 1, got `ada-floor:2`",
        ),
        ("page-entro-kv:tau=0", "option `tau` of page-entro-kv is a temperature above 0, or inf, got `0`"),
        ("page-entro-kv:tau=NaN", "option `tau` of page-entro-kv is a temperature above 0, or inf, got `NaN`"),
        ("page-entro-kv:alpha=-1", "option `alpha` of page-entro-kv is an order from 0 to inf, got `-1`"),
        ("page-entro-kv:pool=4", "option `pool` of page-entro-kv is an odd number of tokens from 1 to 255, got `4`"),
        (
            "page-entro-kv:pool=257",
            "option `pool` of page-entro-kv is an odd number of tokens from 1 to 255, got `257`",
        ),
        (
            "page-entro-kv:row=window:0",
            "option `row` of page-entro-kv is last, accumulated or window:N with N of 1 or more, got `window:0`",
        ),
        ("page-entro-kv:decay=1.5", "option `decay` of page-entro-kv is a factor from 0 to 1, got `1.5`"),
        ("page-entro-kv:sinks=-4", "option `sinks` of page-entro-kv is a number of tokens, 0 or more, got `-4`"),
        (
            "page-entro-kv:recent=third",
            "option `recent` of page-entro-kv is a number of pages, 0 or more, quarter, half, or Ntok with N of 1 or more, \
             got `third`",
        ),
        ("page-entro-kv:preset=fast", "option `preset` of page-entro-kv is paper or serving, got `fast`"),
        ("page-entro-kv:tau=1,tau=1", "option `tau` of page-entro-kv is given twice"),
        ("page-entro-kv:preset=paper,preset=paper", "option `preset` of page-entro-kv is given twice"),
    ];
    for (text, message) in cases {
        assert_eq!(refused(text), message);
    }
    for text in ["page-entro-kv:temperature=1", "page-entro-kv:", "page-entro-kv:tau", "page-entro-kv:tau=1,"] {
        let message = refused(text);
        for key in [
            "preset (paper or serving)",
            "sinks",
            "alpha",
            "tau (a temperature above 0, or inf)",
            "granularity (page or token)",
            "schedule (once, rolling, every:N or per_chunk:N with N tokens",
        ] {
            assert!(message.contains(key), "{text}: {message}");
        }
    }
    assert!(refused("page-entro-kv:Tau=1").starts_with("unknown option `Tau` of page-entro-kv; known are preset ("));
    let mean = refused("mean-pages:tau=1");
    assert!(mean.starts_with("unknown option `tau` of mean-pages; known are preset ("), "{mean}");
    assert!(!mean.contains("alpha") && !mean.contains("pooling"), "{mean}");
}

#[test]
fn options_built_in_code_are_checked_too() {
    for options in [
        PageEntroKvOptions { tau: 0.0, ..PageEntroKvOptions::default() },
        PageEntroKvOptions { tau: f64::NAN, ..PageEntroKvOptions::default() },
        PageEntroKvOptions { decay: -0.1, ..PageEntroKvOptions::default() },
        PageEntroKvOptions { pool_width: 0, ..PageEntroKvOptions::default() },
        PageEntroKvOptions { row: ObservedRow::Window(0), ..PageEntroKvOptions::default() },
    ] {
        assert!(PageEntroKv::new(options.clone()).is_err(), "{options:?}");
    }
}

#[test]
fn policies_of_token_scores_print_what_they_parse_from() {
    for text in [
        "knorm",
        "knorm:sinks=0,recent=3,block=mean,allot=ada-interpolated:0.2,share=layer,granularity=token,schedule=per_chunk:256,pack=score,rows=probe,tiers=f16:0.5+tq4",
        "random:seed=7,allot=global",
        "lagkv:lag=32,first=1,cross=yes,recent=half",
        "cur:window=8,combine=average",
        "snapkv:window=64,kernel=7,pool=max,allot=pyramid:20",
        "streaming-llm:recent=16tok",
        "streaming-llm:rerotate=true,sinks=8",
        "h2o:recent=quarter",
        "tova:heads=union",
        "snapkv:kernel=7,heads=entropy,sinks=4",
        "pyramid-kv:window=16,allot=pyramid:4",
        "ada-kv:pool=avg,allot=ada-interpolated:0.5",
        "ada-kv:normalise=yes",
        "ada-kv:window=16,allot=ada-interpolated:0.5,normalise=yes",
        "rocketkv:kernel=31",
        "rocketkv:tokens=512",
        "rocketkv:window=16,schedule=once,tokens=256,channels=16",
        "quest:tokens=256,dense=0,heads=sum",
        "think:fraction=0.5,window=16,recent=0",
        "scissorhands:history=64,count=rate,recent=32tok",
        "kv-compress:window=8,power=1,kernel=1,buffer=3,recent=0,allot=global",
        "r-kv:window=16,kernel=5,threshold=0.6,lambda=0.07",
        "fastgen:recovery=0.95,local=0.2,frequent=100tok,first=1,special=7,punctuation=9+17,window=64,allot=uniform",
        "fast-kvzip:gates=my gates.safetensors,window=64,allot=uniform",
        "dms:scale=50,offset=-2,window=256",
        "duo-attention:table=pattern.tsv,streaming=0.5,sinks=64,recent=half",
        "kvzap:gates=zap.safetensors,tau=-4.5,window=32,sinks=4",
        "compactor:parts=leverage,blend=0.5,chunk=64,sketch=16,logits=scaled,seed=3,sinks=4",
        "critical-kv:inner=expected-attention,first=0.25,epsilon=0.01,recent=2,allot=ada-floor:0.2",
        "expected-attention:future=32,first=0,covariance=no,vnorm=no,epsilon=0.01,allot=ada-floor:0.2",
    ] {
        let policy = parse_policy(text).unwrap();
        assert_eq!(format!("{policy}"), text);
    }
    assert_eq!(parse_policy("snapkv:preset=kvpress").unwrap().to_string(), "snapkv:window=64");
    for (preset, text) in [
        ("pyramid-kv:preset=kvpress", "pyramid-kv:window=64"),
        ("pyramid-kv:preset=official", "pyramid-kv:window=8,kernel=7,pool=max,allot=pyramid-official:20"),
        ("kv-compress:preset=kvc-w", "kv-compress:window=8,recent=8tok"),
        ("ada-kv:preset=kvpress", "ada-kv:window=64,kernel=5,pool=avg,allot=ada-floor:0.2"),
    ] {
        assert_eq!(parse_policy(preset).unwrap().to_string(), text);
    }
    // Whatever stands first on the line.
    assert_eq!(
        parse_policy("ada-kv:normalise=yes,allot=ada-interpolated:0.5").unwrap().to_string(),
        "ada-kv:allot=ada-interpolated:0.5,normalise=yes"
    );
    assert!(parse_policy("snapkv:normalise=yes").is_err());
    for unsorted in ["9+3", "3+3", "3+", "-1", ""] {
        assert_eq!(
            parse_policy(&format!("fastgen:special={unsorted}")).unwrap_err().to_string(),
            format!("option `special` of fastgen is ascending positions parted by +, or none, got `{unsorted}`")
        );
    }
    assert!(parse_policy("scissorhands:history=4097").is_err());
    assert!(parse_policy("kv-compress:power=3").is_err());
    assert!(parse_policy("r-kv:lambda=NaN").is_err());
    assert!(parse_policy("r-kv:recent=1").is_err());
    assert!(parse_policy("snapkv:recent=3").unwrap_err().to_string().starts_with("unknown option `recent` of snapkv"));
    assert!(parse_policy("streaming-llm:allot=global").is_err());
    assert_eq!(parse_policy("streaming-llm:rerotate=false").unwrap().to_string(), "streaming-llm");
    let rotation = |text: &str| parse_policy(text).unwrap().rotation();
    assert_eq!(
        ["streaming-llm", "streaming-llm:rerotate=true", "knorm"].map(rotation),
        [Rotation::Position, Rotation::Slot, Rotation::Position]
    );
    // No attention is read, so there are no heads to pool.
    assert!(parse_policy("knorm:heads=max").unwrap_err().to_string().starts_with("unknown option `heads` of knorm"));
    assert_eq!(
        parse_policy("h2o:heads=sum").unwrap_err().to_string(),
        "option `heads` of h2o is own, mean, max, entropy or union, got `sum`"
    );
    assert!(parse_policy("knorm:preset=official").is_err());
}

#[test]
fn every_policy_is_listed_under_its_own_name() {
    for entry in POLICIES {
        let policy = entry.default_policy();
        assert_eq!(policy.name(), entry.name);
        assert_eq!(policy.to_string(), entry.name, "defaults need no options");
        assert!(!entry.paper.is_empty());
        assert_eq!(entry.frees, policy.least_budget() == LeastBudget::Pins, "{}", entry.name);
        assert_eq!(entry.requires_file, parse_policy(entry.name).is_err(), "{}", entry.name);
    }
}
