//! Lower layers keep more: the series of PyramidKV.

/// A pyramid's shape (PyramidKV, Cai et al. 2024).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pyramid {
    /// `beta`, above 1: the last layer keeps a `beta`-th of the mean, where the first has room for the rest.
    pub steepness: f64,
    /// Units that every head keeps whatever their scores.
    pub window: usize,
    /// Whose arithmetic.
    pub form: PyramidForm,
}

/// Whose arithmetic a pyramid follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PyramidForm {
    /// kvpress's: fractions, the window inside the series; where a layer would keep fewer than the window all keep the mean.
    Kvpress,
    /// Its authors' code's: integers, a series of what comes before the window, which is added to each layer.
    Official,
}

impl Pyramid {
    /// What the paper was published with.
    pub const STEEPNESS: f64 = 20.0;

    /// A pyramid without a window.
    #[must_use]
    pub fn new(steepness: f64, form: PyramidForm) -> Self {
        Self { steepness, window: 0, form }
    }

    /// Units for each head of `num_layers` layers, of `num_units`, `keep` on average: the [`series`](Self::series), but should its
    /// rounding give more than there is, the first layers give it back.
    #[must_use]
    pub fn layers(self, num_layers: usize, num_units: usize, keep: usize) -> Vec<usize> {
        let mut counts = self.series(num_layers, num_units, keep);
        let mut surplus = counts.iter().sum::<usize>().saturating_sub(keep * num_layers);
        while surplus > 0 {
            for count in counts.iter_mut().filter(|count| **count > keep).take(surplus) {
                (*count, surplus) = (*count - 1, surplus - 1);
            }
        }
        counts
    }

    /// The same as its source rounds it, so that the sum may be a few units more or fewer than `keep` a layer.
    ///
    /// kvpress: `n_l = max - l (max - min) / (L - 1)`, rounded to even, with `min = keep / beta`, `max = 2 keep - min`, or, where a
    /// head has no more, `max = num_units - window`. Official: the same with `keep - window` for `keep` and integer division
    /// throughout, plus the window; `keep` for all where that is more than half of what there is.
    #[must_use]
    pub fn series(self, num_layers: usize, num_units: usize, keep: usize) -> Vec<usize> {
        match self.form {
            _ if num_layers < 2 => vec![keep; num_layers],
            PyramidForm::Kvpress => self.kvpress(num_layers, num_units, keep),
            PyramidForm::Official => self.official(num_layers, num_units, keep),
        }
    }

    fn kvpress(self, num_layers: usize, num_units: usize, keep: usize) -> Vec<usize> {
        let (mean, window) = (keep as f64, self.window as f64);
        let mut least = mean / self.steepness;
        let mut most = 2.0 * mean - least;
        let room = num_units.saturating_sub(self.window) as f64;
        if most >= room {
            (least, most) = (2.0 * mean - room, room);
        }
        let holds = num_units as f64 >= most && most >= least && least >= window;
        if !holds {
            return vec![keep; num_layers];
        }
        let step = (most - least) / (num_layers - 1) as f64;
        (0..num_layers).map(|layer| (most - layer as f64 * step).round_ties_even() as usize).collect()
    }

    fn official(self, num_layers: usize, num_units: usize, keep: usize) -> Vec<usize> {
        let base = keep.saturating_sub(self.window);
        if num_units < keep || num_units < 2 * base {
            return vec![keep.min(num_units); num_layers];
        }
        let mut least = (base as f64 / self.steepness) as usize;
        let mut most = 2 * base - least;
        let room = num_units.saturating_sub(self.window);
        if most >= room {
            (least, most) = ((2 * base).saturating_sub(room), room);
        }
        let step = most.saturating_sub(least) / (num_layers - 1);
        (0..num_layers).map(|layer| most - layer * step + keep.min(self.window)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The figures of kvpress for 32 layers: first, second and last layer, and the sum.
    #[test]
    fn a_pyramid_has_the_layers_of_its_reference() {
        let pyramid = Pyramid { window: 64, ..Pyramid::new(Pyramid::STEEPNESS, PyramidForm::Kvpress) };
        let cases: [(usize, usize, [usize; 3], usize); 7] = [
            (4096, 3072, [4032, 3970, 2112], 98_304),
            (4096, 2048, [3994, 3868, 102], 65_536),
            (4096, 1024, [1024, 1024, 1024], 32_768),
            (4096, 512, [512, 512, 512], 16_384),
            (16_384, 4096, [7987, 7736, 205], 131_072),
            (3900, 1950, [3802, 3683, 98], 62_400),
            (70, 35, [35, 35, 35], 1120),
        ];
        for (num_units, keep, [first, second, last], sum) in cases {
            let layers = pyramid.layers(32, num_units, keep);
            assert_eq!([layers[0], layers[1], layers[31]], [first, second, last], "{keep} of {num_units}");
            assert_eq!(layers.iter().sum::<usize>(), sum);
        }
        assert_eq!(pyramid.layers(1, 4096, 2048), [2048], "one layer is no series");
        assert_eq!(pyramid.layers(0, 4096, 2048), []);
    }

    /// The figures of the authors' code for 32 layers, a capacity of 2,048 and a window of 8: more than the budget, by rounding.
    #[test]
    fn the_authors_rounding_is_given_back_where_it_exceeds_the_budget() {
        let pyramid = Pyramid { window: 8, ..Pyramid::new(Pyramid::STEEPNESS, PyramidForm::Official) };
        let series = pyramid.series(32, 8000, 2048);
        assert_eq!((series[0], series[31], series.iter().sum::<usize>()), (3986, 111, 65_552));
        let layers = pyramid.layers(32, 8000, 2048);
        assert_eq!((layers[0], layers[31], layers.iter().sum::<usize>()), (3985, 111, 65_536));
        assert_eq!(pyramid.series(32, 4000, 2048), [2048; 32], "less than twice what comes before the window");
        assert_eq!(pyramid.series(32, 2000, 2048), [2000; 32], "all there is");
    }
}
